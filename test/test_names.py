"""The public names of the package."""

import warnings

import pytest

import torch_ext_bucketing as teb


def test_public_names_are_few():
    """The public names fit on half a page."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = {name: getattr(teb, name) for name in dir(teb)}
    assert set(teb.__all__) < set(found)
    assert len(found) <= 24, sorted(found)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'BucketUnit'"):
        getattr(teb, "BucketUnit")  # noqa: B009
