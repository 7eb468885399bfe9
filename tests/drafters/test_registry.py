import pytest

from mediaspec.core.types import Drafter
from mediaspec.drafters import DRAFTERS, EagleDrafter, JacobiDrafter, ModelDrafter, make_drafter, register_drafter
from tests.drafters.heads import toy_head
from tests.toy import ToyTarget


def test_names():
    target = ToyTarget()
    assert isinstance(make_drafter("jacobi", window=3), JacobiDrafter)
    assert isinstance(make_drafter("eagle", head=toy_head(target)), EagleDrafter)
    assert isinstance(make_drafter("model", target=target), ModelDrafter)
    for drafter in (make_drafter("jacobi"), make_drafter("model", target=target)):
        assert isinstance(drafter, Drafter)


def test_near_misses_are_named():
    with pytest.raises(ValueError, match="did you mean 'jacobi'"):
        make_drafter("jakobi")
    with pytest.raises(ValueError, match="did you mean 'redraft'"):
        make_drafter("jacobi", redrafts="gumbel")
    with pytest.raises(ValueError, match=r"make_drafter\('eagle', head=\.\.\.\)"):
        make_drafter("eagle")


def test_third_parties_register():
    class Mine(JacobiDrafter):
        pass

    try:
        register_drafter("mine", Mine)
        assert isinstance(make_drafter("mine", window=2), Mine)
        with pytest.raises(ValueError, match="already names"):
            register_drafter("eagle", Mine)
    finally:
        DRAFTERS.pop("mine", None)
