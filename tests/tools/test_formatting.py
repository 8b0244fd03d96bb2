"""Parsing and formatting of numbers with units."""

import pytest

from noloco_jax.formatting import (
    format_bandwidth,
    format_bytes,
    format_clock,
    format_count,
    format_memory,
    format_percent,
    format_perplexity,
    format_seconds,
    format_si,
    format_spread,
    format_tokens_per_second,
    markdown_table,
    parse_bandwidth,
    parse_count,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("parse", "texts", "values"),
    [
        (parse_count, ["125M", "1.3B", "6.8e9", "2k"], [125e6, 1.3e9, 6.8e9, 2000]),
        (parse_seconds, ["40ms", "1.2s", "2min", "0.5", "3 us"], [0.04, 1.2, 120, 0.5, 3e-6]),
        (parse_bandwidth, ["1Gbit", "100Mbit/s", "10Gbps", "25GB/s", "1Tb"], [1e9, 1e8, 1e10, 2e11, 1e12]),
    ],
)
def test_units_are_read_as_people_write_them(parse, texts, values):
    assert [parse(text, "x") for text in texts] == values


@pytest.mark.parametrize(
    ("write", "values", "texts"),
    [
        (format_count, [999, 12_345, 125e6, 1.3e9, 0], ["999", "12.3k", "125M", "1.3B", "0"]),
        (format_tokens_per_second, [5.4, 15_512], ["5.4 tokens/s", "15.5k tokens/s"]),
        (format_si, [1.95e13, 3e9, 12], ["19.5 T", "3 G", "12"]),
        (format_bytes, [5e8, 1.25e10, 12, 0], ["500 MB", "12.5 GB", "12 B", "0 B"]),
        (format_memory, [1.5 * 2**30, 3 * 2**20, 13.25 * 2**10, 12], ["1.5 GiB", "3 MiB", "13.2 KiB", "12 B"]),
        (format_bandwidth, [2.5e9, 1e8], ["2.5 Gbit/s", "100 Mbit/s"]),
        (format_seconds, [0.04, 0.0808, 15, 7200, 3e-6, 0], ["40 ms", "80.8 ms", "15 s", "2 h", "3 us", "0 s"]),
        (format_clock, [0, 59.6, 3723], ["0:00", "1:00", "1:02:03"]),
        (format_percent, [0.0786, 11.73], ["7.86 %", "1173 %"]),
        (format_perplexity, [4.8044, 123456.7, None], ["4.804", "1.235e+05", "inf"]),
        (format_spread, [9.6e-5, 0, None], ["9.60e-05", "0.00e+00", "inf"]),
    ],
)
def test_figures_are_printed_with_few_digits_and_their_unit(write, values, texts):
    assert [write(value) for value in values] == texts


@pytest.mark.parametrize(
    ("write", "value", "text"), [(format_bytes, 999.9e6, "1 GB"), (format_memory, 2**30 - 1, "1 GiB")]
)
def test_a_number_that_rounds_to_a_thousand_takes_the_next_prefix(write, value, text):
    assert write(value) == text


def test_a_table_is_markdown_and_aligned():
    assert markdown_table(["who", "unit", "n"], [["a", "s", "10"], ["be", "min", "2"]], left=2).splitlines() == [
        "| who | unit |  n |",
        "| --- | ---- | -: |",
        "| a   | s    | 10 |",
        "| be  | min  |  2 |",
    ]
