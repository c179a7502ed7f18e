"""What is quantized already is quantized again only where that is asked for."""

import pytest

import quantd

FILE_ERROR = 4
SPEC = "int8:group:32"
# Of quantctl.
ARGUMENTS = "--spec", SPEC, "--no-store"


def check_file(path, place, quantctl, client):
    """That quantctl and Python refuse the file, and when told to, write what comes
    of its floats: the floats to place/floats, the rest to place/once. Returns what
    quantctl said."""
    restored, once = place / "floats.safetensors", place / "once.safetensors"
    twice, of_python = place / "twice.safetensors", place / "python.safetensors"
    refused = quantctl("quantize", path, "-o", once, *ARGUMENTS,
                       code=FILE_ERROR)
    assert "is quantized already" in refused and "--requantize" in refused
    assert not once.exists()
    quantctl("dequantize", path, "-o", restored)
    quantctl("quantize", restored, "-o", twice, *ARGUMENTS)
    quantctl("quantize", path, "-o", once, "--requantize", *ARGUMENTS)
    assert once.read_bytes() == twice.read_bytes()
    with pytest.raises(quantd.QuantdError) as caught:
        quantd.quantize_model(path, of_python, SPEC, client=client)
    assert caught.value.reason == "FILE_UNSUPPORTED"
    assert "requantize=True" in str(caught.value)
    quantd.quantize_model(path, of_python, SPEC, client=client,
                          requantize=True)
    assert of_python.read_bytes() == once.read_bytes()
    return refused
