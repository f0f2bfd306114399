"""What is known of element types without TensorFlow."""

from collections.abc import Mapping

ITEM_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "int8", "uint8", "qint8", "quint8", "int4", "uint4", "int2", "uint2"), 1),
    **dict.fromkeys(("float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16", "qint16", "quint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "qint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes per element, by the name of the element type. A type that is not listed (string, variant) has no fixed size."""
