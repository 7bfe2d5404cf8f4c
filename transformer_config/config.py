"""Hyper-parameters of the Transformer (Vaswani et al. 2017), validated, without a single formula.

Facts live here once; formulas (masks, sinusoids, initialisation) are written twice, once per twin, because a bug
in shared code is invisible to a parity check.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

PAD_ID = 0
"""Id of padding: never attended to as a key, never counted in a loss."""
BOS_ID = 1
"""Id that starts every target sequence."""
EOS_ID = 2
"""Id that ends every source and target sequence."""
UNK_ID = 3
"""Id of whatever the vocabulary lacks."""

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
AttentionImplementation = Literal["plain", "blockwise", "library"]
DType = Literal["float64", "float32", "bfloat16", "float16"]
FinalNorm = Literal["if_pre", "always", "never"]
NormFormula = Literal["variance", "unbiased_deviation"]
NormOrder = Literal["post", "pre"]
OutputBias = Literal["if_untied", "never", "trained", "fixed"]
Positions = Literal["interleaved", "concatenated", "concatenated_half_minus_1", "learned", "fixed"]
TiedEmbeddings = Literal["none", "output", "all"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """One Transformer. The defaults are the paper's base model.

    Raises ValueError, naming the field, what was expected and what was given, when a value makes no model.
    """

    src_vocab_size: int = 37_000
    """Source vocabulary, in pieces (paper 5.1: a shared one of about 37,000)."""
    tgt_vocab_size: int = 37_000
    """Target vocabulary, in pieces."""
    d_model: int = 512
    """Width of every layer's input and output (3.1)."""
    d_ff: int = 2048
    """Inner width of the feed-forward network (3.3)."""
    num_heads: int = 8
    """Attention heads (3.2.2); must divide d_model."""
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    activation: Activation = "relu"
    """Of the feed-forward network. `gelu` is the exact erf form, `gelu_tanh` its approximation."""
    norm_order: NormOrder = "post"
    """`post`: norm(x + sublayer(x)), the paper's. `pre`: x + sublayer(norm(x))."""
    final_norm: FinalNorm = "if_pre"
    """A norm after each stack: with pre-norm alone; `always`, as `torch.nn.Transformer` has it; or `never`."""
    norm_formula: NormFormula = "variance"
    """What a layer norm divides by: √(variance + norm_eps), or the unbiased standard deviation + norm_eps (the
    Annotated Transformer)."""
    norm_eps: float = 1e-5
    """Added in every layer norm, to the variance or to the deviation."""
    use_bias: bool = True
    """Biases in projections, feed-forward networks and norms."""
    output_bias: OutputBias = "if_untied"
    """Of the logits: trained if the output projection is untied and `use_bias`; `never`; always `trained`; or `fixed`,
    carried with the weights and not trained (Marian)."""
    tie_embeddings: TiedEmbeddings = "all"
    """`output`: target embedding and output projection share one matrix; `all`: the source embedding too (3.4)."""
    embedding_scale: bool = True
    """Whether embeddings are multiplied by √d_model where they are read (3.4)."""
    freeze_padding: bool = False
    """Whether the embedding of pad_id gets no gradient where it is read, as with torch's `padding_idx`."""

    positions: Positions = "interleaved"
    """Sinusoids: sin and cos `interleaved` as in 3.5; `concatenated`, all sines then all cosines (Marian);
    `concatenated_half_minus_1`, with d_model/2 - 1 in the exponent's divisor (tensor2tensor, fairseq). Or a table:
    `learned`, or `fixed`, carried with the weights and not trained (for tables that another library has rounded)."""
    positions_skip_padding: bool = False
    """Whether positions count real tokens alone, and padding has none, a vector of zeros (fairseq)."""
    position_offset: int = 0
    """Position number of the first token (fairseq: pad_id + 1)."""
    max_len: int = 1024
    """Positions that are trained on, and rows of a table (besides the offset's)."""
    interpolated_len: int | None = None
    """If set, positions 0 .. interpolated_len-1 are mapped linearly onto the trained 0 .. max_len-1. If not,
    sinusoids are computed on beyond max_len, and a table refuses longer sequences."""

    dropout: float = 0.1
    """On embeddings and on every sublayer's output before it is added (5.4)."""
    attention_dropout: float = 0.0
    """On attention weights."""
    activation_dropout: float = 0.0
    """On the inner layer of the feed-forward network."""

    attention: AttentionImplementation = "plain"
    """`plain` is the formula. `blockwise` is the same with memory linear in length. `library` is the framework's
    fused attention, which has differences of its own (see docs/architecture.md)."""
    attention_block_size: int = 128
    """Keys in a block of the blockwise attention."""
    window: int | None = None
    """If set, self-attention reaches at most this many positions to either side (decoder: into the past)."""

    dtype: DType = "float32"
    """Of activations. Softmax, norms and loss use float32 or better whatever this is."""
    param_dtype: DType = "float32"
    """Of parameters."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of storing what is inside it."""

    pad_id: int = PAD_ID
    bos_id: int = BOS_ID
    """What a target starts with; some models have pad_id here, which then is a real token in the first place."""
    eos_id: int = EOS_ID

    def __post_init__(self) -> None:
        self._check_types()
        layers = ("num_encoder_layers", "num_decoder_layers")
        for name in (*layers, "src_vocab_size", "tgt_vocab_size", "d_model", "d_ff", "num_heads", "max_len"):
            _expect(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        _expect(self.position_offset >= 0, "position_offset", "at least 0", self.position_offset)
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            _expect(0.0 <= getattr(self, name) < 1.0, name, "a rate in [0, 1)", getattr(self, name))
        _expect(self.attention_block_size >= 1, "attention_block_size", "at least 1", self.attention_block_size)
        _expect(self.norm_eps > 0, "norm_eps", "more than 0", self.norm_eps)
        _expect(
            self.d_model % self.num_heads == 0,
            "num_heads",
            f"a divisor of d_model={self.d_model}",
            self.num_heads,
        )
        self._check_positions()
        self._check_vocabularies()
        if self.window is not None:
            _expect(self.window >= 0, "window", "at least 0, or None", self.window)
        if self.attention == "library":
            _expect(
                self.attention_dropout == 0.0,
                "attention_dropout",
                "0 with attention='library', whose random numbers cannot be given",
                self.attention_dropout,
            )

    def _check_types(self) -> None:
        choices = {
            "activation": Activation,
            "attention": AttentionImplementation,
            "dtype": DType,
            "final_norm": FinalNorm,
            "norm_formula": NormFormula,
            "norm_order": NormOrder,
            "output_bias": OutputBias,
            "param_dtype": DType,
            "positions": Positions,
            "tie_embeddings": TiedEmbeddings,
        }
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in choices:
                options = get_args(choices[field.name])
                _expect(value in options, field.name, f"one of {', '.join(options)}", value)
            elif field.type is float:
                _expect(isinstance(value, (int, float)) and not isinstance(value, bool), field.name, "a number", value)
            elif field.type is bool:
                _expect(isinstance(value, bool), field.name, "True or False", value)
            else:
                is_int = isinstance(value, int) and not isinstance(value, bool)
                optional = field.default is None
                _expect(is_int or (optional and value is None), field.name, "an integer", value)

    def _check_positions(self) -> None:
        if not self.has_position_table:
            _expect(self.d_model % 2 == 0, "d_model", "an even number, for pairs of sine and cosine", self.d_model)
        if self.positions == "concatenated_half_minus_1":
            _expect(self.d_model >= 4, "d_model", "at least 4, for a divisor of d_model/2 - 1", self.d_model)
        if self.interpolated_len is not None:
            _expect(
                self.interpolated_len >= max(self.max_len, 2),
                "interpolated_len",
                f"at least max_len={self.max_len} (and 2), or None",
                self.interpolated_len,
            )

    def _check_vocabularies(self) -> None:
        smaller = min(self.src_vocab_size, self.tgt_vocab_size)
        for name in ("pad_id", "bos_id", "eos_id"):
            _expect(0 <= getattr(self, name) < smaller, name, f"an id below {smaller}", getattr(self, name))
        if self.tie_embeddings == "all":
            _expect(
                self.src_vocab_size == self.tgt_vocab_size,
                "tgt_vocab_size",
                f"src_vocab_size={self.src_vocab_size}, since tie_embeddings='all' shares one matrix",
                self.tgt_vocab_size,
            )

    @property
    def head_dim(self) -> int:
        """Width of one head: d_model / num_heads (3.2.2)."""
        return self.d_model // self.num_heads

    @property
    def vocab_sizes(self) -> tuple[int, int]:
        """Of source and target."""
        return self.src_vocab_size, self.tgt_vocab_size

    @property
    def has_final_norm(self) -> bool:
        """Whether a norm stands after each stack."""
        return self.final_norm == "always" or (self.final_norm == "if_pre" and self.norm_order == "pre")

    @property
    def trains_output_bias(self) -> bool:
        """Whether the logits have a bias that is trained."""
        untied = self.use_bias and self.tie_embeddings == "none"
        return self.output_bias == "trained" or (self.output_bias == "if_untied" and untied)

    @property
    def has_position_table(self) -> bool:
        """Whether positions are rows of a table that stands among the weights."""
        return self.positions in ("learned", "fixed")

    @property
    def sequence_limit(self) -> int | None:
        """Longest sequence the model takes, in pieces; None where positions can be computed on."""
        if not self.has_position_table:
            return None
        return self.interpolated_len or self.max_len

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed; validated again."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`. Raises ValueError that names any field this version does not know."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"expected fields of TransformerConfig, got unknown {', '.join(unknown)}")
        return cls(**values)

    @classmethod
    def tiny(cls, **changes: Any) -> Self:
        """For tests: small, and no two dimensions alike, so that no transpose can hide behind equal shapes.

        Its activation is gelu, the one of which the frameworks' own defaults differ.
        """
        fields: dict[str, Any] = {
            "src_vocab_size": 71,
            "tgt_vocab_size": 67,
            "d_model": 30,
            "d_ff": 44,
            "num_heads": 5,
            "num_encoder_layers": 2,
            "num_decoder_layers": 3,
            "activation": "gelu",
            "tie_embeddings": "output",
            "max_len": 33,
            "attention_block_size": 4,
        }
        return cls(**{**fields, **changes})

    @classmethod
    def base(cls, **changes: Any) -> Self:
        """The paper's base model, 65 million parameters (table 3, first row)."""
        return cls(**changes)

    @classmethod
    def big(cls, **changes: Any) -> Self:
        """The paper's big model, 213 million parameters (table 3, last row)."""
        fields: dict[str, Any] = {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.3}
        return cls(**{**fields, **changes})


def _expect(condition: bool, field: str, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(f"{field}: expected {expected}, got {got!r}")
