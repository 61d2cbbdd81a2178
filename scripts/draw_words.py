"""Write the pages for users of other systems: every word, what it means here, and defaults that differ.

python scripts/draw_words.py            print them
python scripts/draw_words.py --write    write docs/coming-from/SYSTEM.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.config.mistakes import rows
from penstock.config.source import toml_value
from penstock.convert.tables import DEFAULTS

FOLDER = Path(__file__).parents[1] / "docs" / "coming-from"
NAMES = {
    "trl": ("TRL", "the command line of a GRPO script, or its YAML config", "grpo.yaml"),
    "verl": ("verl", "the command line with its overrides, or a YAML config", "run.sh"),
    "openrlhf": ("OpenRLHF", "the command line of train_ppo_ray", "run.sh"),
    "xtuner": ("XTuner", "a Python config of its RL trainer", "rl_grpo_gsm8k_async.py"),
    "colossalai": ("ColossalAI", "the command line of its distributed GRPO example", "run.sh"),
}


BY_HAND = "\n## In Python\n"  # begins what a person writes below the tables


def page(system: str) -> str:
    name, reads, file = NAMES[system]
    lines = [
        f"# Coming from {name}",
        "",
        f"`penstock convert {system} {file}` reads {reads} and writes a config, with a comment on every line",
        "whose meaning changed. Nothing is executed. This page is made from the tables of that command.",
        "",
        f"| {name} | here | note |",
        "|---|---|---|",
        *(
            f"| {_code(*row['word'].split())} | {_code(row['key'])} | {row['note']} |"
            for row in rows(system)
            if row["word"]
        ),
        "",
        f"Defaults of {name} that differ from ours; a converted config says them:",
        "",
        "| key | value | note |",
        "|---|---|---|",
        *(f"| `{key}` | `{toml_value(value)}` | {note} |" for key, value, note in DEFAULTS[system]),
        "",
    ]
    return "\n".join(lines)


def _code(*words: str) -> str:
    return ", ".join(f"`{word}`" for word in words if word) or "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    for system in NAMES:
        if options.write:
            path = FOLDER / f"{system}.md"
            _, begins, more = (
                path.read_text("utf-8").partition(BY_HAND) if path.exists() else ("", "", "")
            )
            path.write_text(page(system) + begins + more, "utf-8")
        else:
            print(page(system))


if __name__ == "__main__":
    main()
