"""The public names of the package, and the former ones."""

import warnings

import pytest

import torch_ext_bucketing as teb

pytestmark = pytest.mark.once


def test_public_names_are_few():
    """The public names fit on half a page."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = {name: getattr(teb, name) for name in dir(teb)}
    assert set(teb.__all__) < set(found)
    assert len(found) <= 24, sorted(found)


@pytest.mark.parametrize("former", sorted(teb._RENAMED))
def test_a_former_name_works_and_warns(former):
    present = teb._RENAMED[former]
    with pytest.warns(DeprecationWarning, match=rf"is torch_ext_bucketing\.{present} now") as seen:
        found = getattr(teb, former)
    assert seen[0].filename == __file__
    assert found.__name__ == present.rpartition(".")[2]
    assert former not in dir(teb)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'BucketUnit'"):
        getattr(teb, "BucketUnit")  # noqa: B009
