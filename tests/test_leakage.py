"""The leak guard: what it finds, what it lets pass, and how values are compared."""

import json
from decimal import Decimal

import pytest

from rti_jax.leakage import exempt, leaks, numbers


def call(**arguments):
    return '<tool_call>\n{"name": "f", "arguments": ' + json.dumps(arguments, ensure_ascii=False) + "}\n</tool_call>"


class TestLeaks:
    def test_a_value_that_only_the_evidence_holds(self):
        assert leaks(call(at="39.7817,-89.6501"), ["39.7817", "-89.6501"], ["Route to Springfield"]) == (
            "39.7817",
            "-89.6501",
        )

    @pytest.mark.parametrize("where", [0, 1, 2])
    def test_a_value_that_is_visible_anywhere_passes(self, where):
        visible = ["request", "original turn", "tool schemas"]
        visible[where] += " order W123456"
        assert leaks("refund W123456", ["W123456"], ["request", "original turn"]) == ("W123456",)
        assert leaks("refund W123456", ["W123456"], visible) == ()

    def test_thinking_counts(self):
        assert leaks("<think>It is in Illinois.</think>\n\nsearch", ["Illinois"], ["Springfield"]) == ("Illinois",)

    @pytest.mark.parametrize(
        "written", ["SPRINGFIELD", "Springfield.", '"springfield"', "spring\\u0066ield", "near  Springfield,IL"]
    )
    def test_names_match_in_any_case_and_punctuation(self, written):
        assert leaks(written, ["Springfield"], []) == ("Springfield",)

    def test_names_match_whole_words_only(self):
        assert leaks("Springfields, Kings", ["Springfield", "King"], []) == ()
        assert leaks("New  York City", ["New York"], []) == ("New York",)

    def test_accents_and_escapes_are_the_same_letters(self):
        assert leaks("S\\u00e3o Paulo", ["São Paulo"], []) == ("São Paulo",)
        assert leaks("São Paulo", ["São Paulo"], ["the request says Sao Paulo"]) == ()

    @pytest.mark.parametrize(
        "written", ["39.78170", "(39.7817)", "lat=39.7817", "-39.7817", "39.7817,-89.6501", "39.7817N", "is...39.7817."]
    )
    def test_numbers_match_by_value(self, written):
        assert leaks(written, ["39.7817"], []) == ("39.7817",)

    @pytest.mark.parametrize("written", ["139.7817", "39.78171", "39.78", "x39.7817", "1.39.7817"])
    def test_another_number_is_no_leak(self, written):
        assert leaks(written, ["39.7817"], []) == ()

    def test_a_pair_leaks_by_either_number(self):
        assert leaks("go to 89.6501 W", ["39.7817,-89.6501"], ["39.7817"]) == ("39.7817,-89.6501",)
        assert leaks("go to 39.7817", ["39.7817,-89.6501"], ["39.7817"]) == ()

    def test_short_numbers_are_derived(self):
        assert leaks("I take 2 of 12 at 0.5", ["2", "12", "0.5"], []) == ()
        assert leaks("order 100", ["100"], []) == ("100",)

    def test_numbers_and_ids_of_the_evidence_text(self):
        text = "Pay 1,250 for order #W83-12 in 3 steps; the agent must apologise."
        assert leaks("I must pay 1250 for W83-12 in 3 steps", [], [], text) == ("1,250", "W83-12")
        assert leaks("I apologise", [], [], text) == ()

    def test_empty_inputs(self):
        assert leaks("", ["", " ", "abc"], []) == ()
        assert leaks("abc", [], [""]) == ()


def test_numbers_by_value():
    assert numbers("1,234 and 0.50, .5 -7. v2 2.5.1 1,23") == {Decimal(1234), Decimal("0.5"), Decimal(7)} | {
        Decimal(1),
        Decimal(23),
    }


@pytest.mark.parametrize(
    "number, is_exempt", [("0", True), ("99", True), ("100", False), ("0.05", True), ("1.25", False)]
)
def test_exempt_has_fewer_than_three_digits(number, is_exempt):
    assert exempt(Decimal(number)) is is_exempt
