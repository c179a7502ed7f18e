"""What is quantized already is quantized again only where that is asked for."""

FILE_ERROR = 4
SPEC = "int8:group:32"
# Of quantctl.
ARGUMENTS = "--spec", SPEC, "--no-store"


def check_file(path, place, quantctl):
    """Checks that quantctl refuses the file, and when told to, writes what comes
    of its floats: the floats to place/floats, the rest to place/once. Returns what
    it said."""
    restored, once = place / "floats.safetensors", place / "once.safetensors"
    twice = place / "twice.safetensors"
    refused = quantctl("quantize", path, "-o", once, *ARGUMENTS,
                       code=FILE_ERROR)
    assert "is quantized already" in refused and "--requantize" in refused
    assert not once.exists()
    quantctl("dequantize", path, "-o", restored)
    quantctl("quantize", restored, "-o", twice, *ARGUMENTS)
    quantctl("quantize", path, "-o", once, "--requantize", *ARGUMENTS)
    assert once.read_bytes() == twice.read_bytes()
    return refused
