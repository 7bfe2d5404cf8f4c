import http.server
import threading

import pytest

from train.cloud_tpu import is_one_of_several
from train.parallel import several_processes


@pytest.fixture
def machine(tmp_path):
    """Makes the folder of PCI devices, and a metadata server; returns how to ask."""
    servers = []

    def machine(*, vendors=("0x8086", "0x1ae0"), workers="a:b:10.0.0.1,a:c:10.0.0.2", status=200):
        for i, vendor in enumerate(vendors):
            (tmp_path / str(i)).mkdir()
            (tmp_path / str(i) / "vendor").write_text(vendor + "\n")

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append((self.path, self.headers["Metadata-Flavor"]))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(workers.encode())

            def log_message(self, *args):
                pass

        asked: list[tuple[str, str]] = []
        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return {"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}"}, asked

    yield machine
    for server in servers:
        server.shutdown()
        server.server_close()


def test_several_workers(machine, tmp_path):
    environment, asked = machine()
    assert is_one_of_several(environment, devices=tmp_path)
    assert asked == [("/computeMetadata/v1/instance/attributes/worker-network-endpoints", "Google")]


def test_newer_slices_name_their_workers_plainly(machine, tmp_path):
    environment, _ = machine(workers="host-0,host-1,host-2,host-3")
    assert is_one_of_several(environment, devices=tmp_path)


@pytest.mark.parametrize("options", [{"workers": "a:b:10.0.0.1"}, {"status": 404}], ids=["one worker", "no attribute"])
def test_no_others(machine, tmp_path, options):
    environment, asked = machine(**options)
    assert not is_one_of_several(environment, devices=tmp_path)
    assert len(asked) == 1


def test_nobody_is_asked_without_tpus(machine, tmp_path):
    environment, asked = machine(vendors=("0x8086", "0x10de"))
    assert not is_one_of_several(environment, devices=tmp_path)
    assert asked == []


def test_nobody_is_asked_where_there_is_no_server(machine, tmp_path):
    environment, asked = machine()
    assert not is_one_of_several({**environment, "TPU_SKIP_MDS_QUERY": "1"}, devices=tmp_path)
    assert asked == []


def test_nobody_answers(machine, tmp_path):
    machine()
    assert not is_one_of_several({"GCE_METADATA_IP": "127.0.0.1:9"}, devices=tmp_path)


def test_it_is_what_a_run_asks(machine, tmp_path, monkeypatch):
    environment, _ = machine()
    monkeypatch.setattr("train.cloud_tpu.PCI_DEVICES", tmp_path)
    assert several_processes(environment) == "Cloud TPU"
    monkeypatch.setattr("train.cloud_tpu.PCI_DEVICES", tmp_path / "none")
    assert several_processes(environment) is None
