import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import math_verify
import pytest

from openrlhf.rewards import math
from openrlhf.utils import extract_boxed_answer, grade_answer, grade_response


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ x^{2} + {y} }", "x^{2} + {y}"),
        (r"\fbox{7}", "7"),
        (r"the set \boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"$\boxed 5$ is it", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{3} and then \boxed{4", "3"),
        ("no box", None),
        (r"\boxed{never closed", None),
        ("", None),
    ],
)
def test_the_last_complete_box_is_the_answer(text, answer):
    assert extract_boxed_answer(text) == answer


@pytest.mark.parametrize(
    ("prediction", "truth"),
    [
        ("42", "42"),
        ("0.5", r"\frac{1}{2}"),
        (r"\frac{2}{4}", "1/2"),
        ("x + 1", "1+x"),
        (r"2\sqrt{2}", r"\sqrt{8}"),
        (r"\{2, 1\}", r"\{1,2\}"),
        ("a word", "aword"),
        ("42.", "42"),
        (r"10\,000", "10000"),
        (r"1~234\;567", "1,234,567"),
        ("10 000", "10000"),
        ("42", 42),
        (r"\frac{1}{2}", 0.5),
        # Python writes small and large numbers as 1e-05 and 1e+20
        ("0.00001", 1e-05),
        ("1" + 20 * "0", 1e20),
        ("1.5e-3", "0.0015"),
        ("90°", "90"),
        ("–5", "-5"),
        ("YES", "yes"),
        ("0.333333", "1/3"),
        ("6.674e-11", "6.67e-11"),
        (r"50\%", "50"),
        ("Evelyn", r"\text{Evelyn}"),
        (r"\text{Yes}", "yes"),
        (r"\text{是}", "是"),
        # math-verify reads 2 1/2 as a product, and drops the word behind 18
        ("2 1/2", "2.5"),
        ("5/2", "2 1/2"),
        ("18 million", "18,000,000"),
        (r"1.5\text{ thousand dollars}", "1500"),
        ("2 1/2 Million", "2500000"),
        ("5 thousand million", "5 billion"),
        ("5", "5 km"),
        ("18 dollars", "18"),
        ("18", "18 dollars"),
        ("12 red books", "12 Red Book"),
        ("$18 million per day", "18000000"),
        ("2 1/2 cups", "2.5"),
        ("6 xyz", "6xyz"),
        (r"5\text{ kilometers}", "5 km"),
        ("5 hours", r"5\ \mathrm{h}"),
        ("€1,234.50", "1234.5"),
        ("18 £ million", "18000000"),
        ("3 x 10^8", "300000000"),
        # characters that math-verify does not read
        ("2½ cups", "2.5"),
        ("½x", "x/2"),
        ("2√(x+1)", r"2\sqrt{x+1}"),
        ("x²y", "x^2y"),
        ("5 × 10⁻³", "0.005"),
        ("(1, ∞)", r"(1, \infty)"),
        (r"\varnothing", "∅"),
        ("1.234.567,5", "1234567.5"),
        ("1'234", "1234"),
        ("negative 5", "-5"),
        # units and currencies
        ("25 cm²", "25"),
        ("6 feet", "6 ft"),
        ("10 inches", "10 inch"),
        ("18 euros", "€18"),
        ("$20 per day", "$20"),
    ],
)
def test_equal_answers(prediction, truth):
    assert grade_answer(prediction, truth)


@pytest.mark.parametrize(
    ("prediction", "truth"),
    [
        ("41", "42"),
        (None, "42"),
        ("", "42"),
        ("x+2", "x+1"),
        ("(1,2)", "(2,1)"),
        (r"10\,000", "0"),
        ("1 200", "200"),
        ("41", 42),
        # what math-verify takes for equal: 5 * e * 1, the letters of a word in any order, 3 - 1 = 4 - 2
        ("5e1", "1e5"),
        ("silent", "listen"),
        ("on", "No"),
        ("4-2", "3-1"),
        ("2023-04-02", "2023-05-01"),
        ("2017", "2023-05-01"),
        # and all small numbers, which it rounds to six decimals
        ("0.0000000002", "0.0000000001"),
        ("6.0e-11", "6.67e-11"),
        (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"),
        ("20°C", "20"),
        (r"\text{east}", "seat"),
        ("2 1/2", "1"),
        ("2 1/2", "21/2"),
        ("18 million", "18"),
        (r"18 \text{ million dollars}", "18"),
        ("2 1/2 million", "5/2"),
        ("5 km", "5 m"),
        ("5 kilometers", "5 m"),
        ("18 dollars", "18 cents"),
        ("18 million people", "18"),
        ("3 sin x", "3"),
        ("5 theta", "5"),
        (r"5\text{ cm}^2", r"5\text{ cm}"),
        ("5 hours", "5 minutes"),
        ("5 miles", "5 km"),
        ("5 feet", "5 inches"),
        ("5 lb", "5 kg"),
        ("€18", "£18"),
        ("18 dollars", "€18"),
        ("$18", "18 €"),
        ("25 cm²", "25 cm"),
        ("1101_2", "1101_{3}"),
        ("negative 5", "5"),
        ("10 minus 5", "-5"),
        ("2½", "1"),
        ("1.234", "1234"),
        ("(1.234,5)", "1234.5"),
    ],
)
def test_wrong_answers_are_rejected(prediction, truth):
    assert not grade_answer(prediction, truth)


def test_reward_files_import_nothing_heavy():
    code = (
        "import sys; from openrlhf.utils import grade_answer; "
        "assert not {'torch', 'sympy', 'transformers'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("response", "label", "right"),
    [
        # of an equation, the last side is the answer: a policy learned to copy the question in front of it
        ("The final answer is 2 + 5 - 3 = 4.", "4", True),
        ("The final answer is 2 + 5 - 3 = 7.", "4", False),
        ("The final answer is $2 + 5 - 3 = 7$.", "4", False),
        ("The answer is $2 + 5 - 3$ = 7", "4", False),
        ("The answer is 2 + 5 = 7 - 3 = 4", "4", True),
        (r"\boxed{2 + 5 - 3 = 7}", "4", False),
        (r"\boxed{2 + 5 - 3 = 4}", "4", True),
        ("The answer is x = 4", "4", True),
        # a question that is copied answers nothing
        ("The final answer is 2 + 5 - 3.", "4", False),
        (r"\boxed{2 \times 3}", "6", False),
        # numbers in other forms are answers
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        ("The answer is 1/2", "0.5", True),
        (r"\boxed{2^{10}}", "1024", True),
        ("The answer is -14.", "-14", True),
        (r"\boxed{1 + \sqrt{2}}", r"\sqrt{2} + 1", True),
        ("", "4", False),
        # groups of digits, which math-verify would multiply
        (r"The answer is $10\,000$.", "10000", True),
        (r"The answer is $10\,000$.", "0", False),
        # the format of DeepSeek-R1: what is in the tags
        ("<think>1+1</think><answer>2</answer>", "2", True),
        ("<think>1+1</think> <answer> The answer is 3/4. </answer><|im_end|>", "0.75", True),
        (r"<think>\boxed{3}</think><answer>4</answer>", "3", False),
        ("<answer>3</answer> no: <answer>4</answer>", "4", True),
        (r"<think>Is it \boxed{3}?</think> The answer is 4.", "4", True),
        (r"<think>Is it \boxed{3}?</think> The answer is 4.", "3", False),
        ("<think>Or <answer>3</answer>?</think> It is 4.", "3", False),
        ("<answer>Yes</answer>", "yes", True),
        ("<think>4</think><answer>", "4", False),
        # numbers as they are in the file
        (r"\boxed{5}", 5, True),
        ("The answer is 0.5", 0.5, True),
        ("The answer is 0.00001", 1e-05, True),
        ("It is 1e5.", "100000", True),
        ("The answer is 5 × 10^3.", "5000", True),
        (r"The answer is 5 \times 10^{-3}", "0.005", True),
        # dates and scores are no differences
        ("The score was 3-1.", "3-1", True),
        ("The score was 4-2.", "3-1", False),
        ("It was 4-3-1", "3-1", False),
        (r"\boxed{silent}", "listen", False),
        # a number in scientific notation is worked out, a product of one is not
        (r"\boxed{3 \times 10^8}", "300000000", True),
        (r"\boxed{2 \times 3 \times 10^8}", "6e8", False),
        # names with a number, ratios, times and versions
        ("It was Apollo 11.", "Apollo 11", True),
        ("It was Apollo 13.", "Apollo 11", False),
        ("The ratio is 3:4.", "3:4", True),
        ("The ratio is 1:3:4.", "3:4", False),
        ("The address is 192.168.1.1", "192.168.1.1", True),
        ("The address is 192.168.1.2", "192.168.1.1", False),
        ("The answer is 18 million.", "18", False),
        ("She has 12 books.", "12 books", True),
        ("She has 12 books.", "13 books", False),
        ("She has 12.", "12 books", True),
        ("The answer is 18 million.", "18000000", True),
        ("The answer is 2 1/2.", "2.5", True),
        ("The answer is 2 1/2.", "1", False),
        ("The answer is 2 1/2 million.", "2500000", True),
        ("The distance is $5$ kilometers.", "5 km", True),
        ("The distance is $5$ kilometers.", "5 m", False),
        # no spaces around numbers and letters
        ("答案是5。", "5", True),
        ("答案是15。", "5", False),
        ("共有-5个", "-5", True),
        ("The answer is B.", "(B)", True),
        ("<answer>(b)</answer>", "B)", True),
        ("The answer is A.", "(B)", False),
        ("故选A。", "A", True),
        ("故选B。", "A", False),
        ("정답은 5입니다.", "5", True),
        ("不是", "是", False),
        (r"\boxed{5}", 6, False),
        # what is denied is no answer
        ("The answer is not 42.", "42", False),
        ("It isn't $42$ but $43$.", "43", True),
        ("The answer is 43, not 42.", "43", True),
        ("It is not possible.", "possible", False),
        ("He is not guilty.", "not guilty", True),
        ("The answer is A or B.", "B", False),
        ("<think>It is \\boxed{42}", "42", False),
        # nor is a quotient that stands in the question
        (r"\boxed{84 \div 2}", "42", False),
        (r"\boxed{\frac{84}{2}}", "42", False),
        (r"\boxed{1/2 million}", "500000", True),
        ("The answer is negative 5.", "-5", True),
        ("The answer is minus 5.", "5", False),
        ("The price is €18.", "£18", False),
        ("Das sind 1.234,50 €.", "1234.5", True),
        ("The answer is 5².", "5", False),
        # formulas in plain text
        ("The answer is x².", "x^2", True),
        ("It is (0, 1).", "(0, 1)", True),
        ("It is y + x^2.", "x^2", False),
        ("They are 1, 2, 3.", "2, 3", False),
        ("It is 15 - 5 km.", "5 km", False),
    ],
)
def test_final_answers_of_responses(response: str, label: str | float, right: bool) -> None:
    assert grade_response(response, label) == right


@pytest.mark.parametrize("label", [None, ["5"], {"answer": 5}])
def test_a_label_is_text_or_a_number(label: object) -> None:
    with pytest.raises(TypeError, match="text or a number"):
        grade_response(r"\boxed{5}", label)  # type: ignore[arg-type]


def test_answers_are_graded_in_every_thread():
    """Agents and `Run.reward` have threads of their own, which signals do not reach."""
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(grade_response, "The answer is 3 + 4 = 7.", "7").result()
        assert not thread.submit(grade_response, "The answer is 8.", "7").result()
        assert thread.submit(grade_answer, r"\frac{1}{2}", "0.5").result()
        assert thread.submit(grade_answer, "2^{2^{3}}", "256").result()
        assert thread.submit(grade_answer, "10^{3} \\cdot 10^{9}", "10^{12}").result()


@pytest.mark.parametrize(
    "endless", ["9^{9^{9^{9}}}", "10^{10^{10}}", "2^{1000000000}", "99999!", "9^{10!}", "3^{3^{3^3}}"]
)
def test_numbers_that_cannot_be_written_out_hold_up_no_thread(endless):
    """math-verify would compute them for ever, in a call that nothing interrupts."""
    assert not grade_answer(endless, "5")
    with ThreadPoolExecutor(1) as thread:
        assert not thread.submit(grade_answer, endless, "5").result(60)
        assert thread.submit(grade_answer, endless, f" {endless}.").result(60)


def test_a_busy_machine_makes_no_right_answer_wrong(monkeypatch) -> None:
    """The limit of a comparison is one of CPU time, and leaves neither a timer nor a handler behind."""
    assert grade_answer("2/4", "1/2")  # math-verify's first call takes long
    parse, handler = math_verify.parse, signal.getsignal(signal.SIGPROF)
    monkeypatch.setattr(math, "LIMIT", 1.0)
    monkeypatch.setattr(math_verify, "parse", lambda *a, **k: (time.sleep(0.6), parse(*a, **k))[1])
    assert grade_answer("3/6", "1/2")

    def never_ends(*_, **__):
        try:
            while True:
                pass
        except Exception:  # as around every step of math-verify
            return True

    monkeypatch.setattr(math_verify, "verify", never_ends)
    assert not grade_answer("4/8", "1/2")
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)
    assert signal.getsignal(signal.SIGPROF) == handler
