"""Attributes that are replaced, and put back."""

from __future__ import annotations

import functools
import types

import pytest

from sherd.patches.replacing import Replacements, subclass, swap_class

pytestmark = pytest.mark.pure


class Base:
    def inherited(self):
        return "inherited"


class Owner(Base):
    def method(self):
        return "method"

    @staticmethod
    def static():
        return "static"


def marked(original):
    @functools.wraps(original)
    def call(*args):
        return f"ours {original(*args)}"

    return call


def test_what_is_replaced_comes_back():
    before = dict(vars(Owner))
    replacements = Replacements()
    for _ in range(2):  # the second time nothing happens
        replacements.replace(Owner, "method", marked)
        replacements.replace(Owner, "inherited", marked)
        replacements.replace(Owner, "static", lambda original: staticmethod(marked(original)))
    assert [Owner().method(), Owner().inherited(), Owner.static()] == ["ours method", "ours inherited", "ours static"]
    replacements.restore()
    replacements.restore()
    assert dict(vars(Owner)) == before and Owner().inherited() == "inherited"


def test_what_somebody_else_put_on_top_stays():
    module = types.ModuleType("module")
    original = module.function = lambda: "original"
    replacements = Replacements()
    replacements.replace(module, "function", marked)
    ours = module.function

    @functools.wraps(ours)
    def theirs():
        return f"theirs, {ours()}"

    module.function = theirs
    replacements.replace(module, "function", marked)  # ours is in there
    assert module.function() == "theirs, ours original"
    replacements.restore()
    assert module.function is theirs

    module.function = original  # as a mock does at its end
    replacements.replace(module, "function", marked)
    assert module.function() == "ours original"
    replacements.restore()
    assert module.function is original


def test_an_object_with_other_methods():
    class Methods:
        def method(self):
            return f"ours {super().method()}"

    thing = Owner()
    swap_class(thing, Methods)
    assert thing.method() == "ours method" and isinstance(thing, Owner) and type(thing).__qualname__ == "Owner"
    assert type(thing) is subclass(Methods, Owner)
