"""Which primitives XLA fuses into others, and which are kernels of their own."""

from __future__ import annotations

CHEAP = frozenset(
    (
        *("abs", "add", "add_any", "and", "ceil", "clamp", "complex", "conj", "convert_element_type", "copy", "copy_p"),
        *("div", "eq", "eq_to", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "le_to", "lt", "lt_to"),
        *("max", "min", "mul", "name", "ne", "neg", "not", "one_minus_square", "optimization_barrier", "or", "pvary"),
        *("real", "reduce_precision", "round"),
        *("select_n", "sharding_constraint", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign"),
        *("square", "stop_gradient", "sub", "xor"),
    )
)
"""Pointwise, and computed again by each reader without loss."""
DEAR = frozenset(
    (
        *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "clz", "cos", "cosh", "digamma"),
        *("erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "lgamma", "log", "log1p", "log2", "logistic", "nextafter"),
        *("population_count", "pow", "rem", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh"),
    )
)
"""Pointwise functions that take longer than reading their result."""
VIEWS = frozenset({"expand_dims", "reshape", "squeeze", "transpose"})
"""The same bytes, or what a product reads in another order."""
SHAPING = frozenset({"broadcast", "broadcast_in_dim", "iota", "pad", "rev", "slice", "split"})
LEFT_TO_READERS = SHAPING - {"pad", "rev"}
"""Slices and repetitions are read in place, even by products."""
FUSED = CHEAP | DEAR | VIEWS | SHAPING
SUMS = frozenset(
    {"argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"}
)
"""Kernels into which pointwise equations are fused."""
