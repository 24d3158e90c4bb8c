from __future__ import annotations

import pytest

from autopar.errors import ConfigError
from autopar.importers.shell import program_words

SCRIPT = """
#!/bin/bash
# Runs the "345M" parameter model
GPUS_PER_NODE=8
CHECKPOINT_PATH=$1 #<Specify path>
TP=4

DISTRIBUTED_ARGS="
    --nproc_per_node $GPUS_PER_NODE \\
    --nnodes 1
"
GPT_MODEL_ARGS=(
    --num-layers 24 # blocks
    --tensor-model-parallel-size ${TP}
)

torchrun $DISTRIBUTED_ARGS pretrain_gpt.py \\
    ${GPT_MODEL_ARGS[@]} \\
    --save "$CHECKPOINT_PATH/$NAME" \\
    ${DATA_ARGS[@]} 2>&1 | tee log --not-ours
"""


def test_a_launch_script() -> None:
    words = ["--num-layers", "24", "--tensor-model-parallel-size", "4", "--save", "$1/$NAME", "${DATA_ARGS[@]}"]
    assert program_words(SCRIPT) == words


def test_variables_with_several_words_are_several_words() -> None:
    assert program_words('ARGS="--lr 1 --bf16"\npython pretrain_gpt.py $ARGS') == ["--lr", "1", "--bf16"]


@pytest.mark.parametrize(
    "text, words",
    [
        ("--lr 1", ["--lr", "1"]),
        ("ARGS=(--lr 1)", []),
        ("ARGS=(--lr 1 ); $ARGS", ["--lr", "1"]),
        ("ARGS=(--lr", []),
        ("torchrun --nnodes 2 a.py --lr 1 > log", ["--lr", "1"]),
        ("", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert program_words(text.replace(";", "")) == words


@pytest.mark.parametrize(
    "text, words",
    [
        ("--tp ${TP:-4} --pp ${1-2}", ["--tp", "4", "--pp", "2"]),
        ("TP=8\nEMPTY=\ntorchrun a.py --tp ${TP:-4} --a ${EMPTY:-1} --b ${EMPTY-1}", ["--tp", "8", "--a", "1", "--b"]),
        ("TP=${TP:-4}\nSIZE=${SIZE:-$TP}\ntorchrun a.py --tp $TP --dir x/${NAME:-${SIZE}}/", ["--tp", "4", "--dir", "x/4/"]),
        ("--tp ${TP:-$OTHER}", ["--tp", "$OTHER"]),
    ],
)
def test_variables_have_defaults(text: str, words: list[str]) -> None:
    assert program_words(text) == words


def test_an_open_quote() -> None:
    with pytest.raises(ConfigError, match="close every quote"):
        program_words("--save 'out")


def test_arguments_that_are_added_to_a_variable_count() -> None:
    listed = "ARGS=(--a 1)\nARGS+=(--b 2)\ntorchrun train.py ${ARGS[@]}"
    assert program_words(listed) == ["--a", "1", "--b", "2"]
    quoted = 'ARGS="--a 1"\nARGS+=" --b 2"\ntorchrun train.py $ARGS'
    assert program_words(quoted) == ["--a", "1", "--b", "2"]


def test_a_variable_with_a_value_on_each_branch_is_an_error() -> None:
    with pytest.raises(ConfigError, match="assigns ARGS more than once"):
        program_words('if [ $X ]; then\nARGS="--a 1"\nelse\nARGS="--a 2"\nfi\ntorchrun train.py $ARGS')


def test_a_python_file_may_be_the_value_of_an_option() -> None:
    assert program_words("torchrun --nproc 8 train.py --a 1 --data my.py --b 2") == ["--a", "1", "--data", "my.py", "--b", "2"]
    assert program_words("python prepare.py --a 0\ntorchrun --nproc 8 train.py --b 2") == ["--b", "2"]
