"""Slices of Cloud TPU that `gcloud` has made: no variable tells workers of each other, the machine's metadata do."""

import http.client
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")
GOOGLE = "0x1ae0"
"""As a vendor of PCI devices."""
TIMEOUT = 5.0
"""Seconds. Beside its own machine the metadata server answers at once."""


def is_one_of_several(environment: Mapping[str, str], *, devices: Path | None = None) -> bool:
    """Whether this machine is one of several workers of a slice, so that `jax.distributed` finds the others by itself.

    The metadata server is asked only where there are TPUs, and not where `TPU_SKIP_MDS_QUERY` says that there is none.
    """
    if "TPU_SKIP_MDS_QUERY" in environment or not _has_tpus(devices or PCI_DEVICES):
        return False
    return "," in (_attribute("worker-network-endpoints", environment) or "")


def _has_tpus(devices: Path) -> bool:
    return any(vendor.read_text().strip() == GOOGLE for vendor in devices.glob("*/vendor"))


def _attribute(name: str, environment: Mapping[str, str]) -> str | None:
    """Of the instance; None where nobody answers, or there is no such attribute."""
    host = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/attributes/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError):
        return None
