from __future__ import annotations

import re
import shlex

import pytest

from autopar.errors import ConfigError
from autopar.importers.shell import MOST_DEEP, MOST_WAYS, program_words

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
    assert program_words(SCRIPT) == [words]


def test_variables_with_several_words_are_several_words() -> None:
    assert program_words('ARGS="--lr 1 --bf16"\npython pretrain_gpt.py $ARGS') == [["--lr", "1", "--bf16"]]


@pytest.mark.parametrize(
    "text, words",
    [
        ("--lr 1", ["--lr", "1"]),
        ("ARGS=(--lr 1)", []),
        ("ARGS=(--lr 1 ); $ARGS", ["--lr", "1"]),
        ("ARGS=(--lr", []),
        ("torchrun --nnodes 2 a.py --lr 1 > log", ["--lr", "1"]),
        ("torchrun a.py --lr 1\n\nset +x", ["--lr", "1"]),
        ("TP=8; PP=2\ntorchrun a.py --tp $TP --pp $PP --bf16; echo done", ["--tp", "8", "--pp", "2", "--bf16"]),
        ("cd x&&torchrun a.py --bf16>log 2>&1&\nwait", ["--bf16"]),
        ("torchrun a.py --bf16|tee log --b 2", ["--bf16"]),
        ("torchrun a.py --exp=b.py lr=3", ["--exp=b.py", "lr=3"]),
        ("bash -c 'cd x; torchrun a.py --lr 1; echo'", ["--lr", "1"]),
        ('CMD="torchrun a.py --lr 1 &> log"\necho $CMD\neval $CMD\nset +x', ["--lr", "1"]),
        ("cat <<END > x\n{ it's: $A }\nEND\nsbatch <<EOF\n#SBATCH --nodes 2\nsrun torchrun a.py --lr 1\nEOF\nwait", ["--lr", "1"]),
        ("--lr 1  # it's all\n# --tp 2 \\\n--bf16", ["--lr", "1", "--bf16"]),
        ("ARGS=(\n # --a 1 \\\n --b 2 \\\n # --c 3\n)\ntorchrun a.py ${ARGS[@]}", ["--b", "2"]),
        ('torchrun a.py --spec "b.py c" --lr 1', ["--spec", "b.py c", "--lr", "1"]),
        ("cd x &&\n\ntorchrun a.py --lr 1", ["--lr", "1"]),
        ("--layout Et|(tt|)*6,L --bf16 | tee log", ["--layout", "Et|(tt|)*6,L", "--bf16"]),
        ("", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert program_words(text) == [words]


def test_the_program_is_the_last_that_is_given_what_is_wanted() -> None:
    text = "python prepare.py --a 0\ntorchrun train.py --lr=1 --b 2\npython tools/report.py --log x"
    assert program_words(text, "--lr") == [["--lr=1", "--b", "2"]]
    assert program_words(text) == [["--log", "x"]]


@pytest.mark.parametrize("between", ["\n", "\n\n", " \\\n # --a 1 \\\n"])
def test_a_line_of_the_launch_that_a_shell_does_not_see(between: str) -> None:
    with pytest.raises(ConfigError, match="--bf16 begins a line of its own after the launch"):
        program_words(f"torchrun train.py --lr 1{between}--bf16")


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
    assert program_words(text) == [words]


@pytest.mark.parametrize("mark", ["'", '"', "`", "$(", "${"])
def test_an_open_quote(mark: str) -> None:
    with pytest.raises(ConfigError, match=rf"^the {re.escape(mark)} in line 2 .* close every quote"):
        program_words(f"--lr 1\n--save {mark}out")


def test_scripts_in_scripts_and_brackets_have_an_end() -> None:
    found, text = [], "a.py --lr 1"
    for _ in range(MOST_DEEP + 1):
        text = f"bash -c {shlex.quote(text)}"
        found.append(program_words(text))
    assert found == [*[[["--lr", "1"]]] * MOST_DEEP, [[]]]
    with pytest.raises(ConfigError, match="nested too deep"):
        program_words("${" * 5000)


def test_arguments_that_are_added_to_a_variable_count() -> None:
    listed = "ARGS=(--a 1)\nARGS+=(--b 2)\ntorchrun train.py ${ARGS[@]}"
    assert program_words(listed) == [["--a", "1", "--b", "2"]]
    quoted = 'ARGS="--a 1"\nARGS+=" --b 2"\ntorchrun train.py $ARGS'
    assert program_words(quoted) == [["--a", "1", "--b", "2"]]


@pytest.mark.parametrize(
    "text, values",
    [
        ("if [ $X ]; then TP=8; else TP=2; fi", ["8", "2"]),
        ("if [ $X ]\nthen\n TP=8\nelif [ $Y ]; then TP=4\nfi", ["8", "4", ""]),
        ('TP=8\n[ "$SMALL" = 1 ] && TP=2', ["2", "8"]),
        ("TP=8\ntest -f x || { echo; TP=2; }", ["2", "8"]),
        ("TP=8\nif [ $X ]; then TP=2; fi; TP=4", ["4"]),
        ("TP=8\ncase $1 in\n --tp) TP=2; shift;;\n --pp|-p) PP=$2;;\nesac", ["2", "8"]),
        ("TP=8\nfor TP in 1 2; do echo; done", ["1", "2", "8"]),
        ("TP=8\nwhile read TP; do TP=2; done", ["8", "2"]),
        ("TP=8\n(cd x; TP=2)\nrun() { TP=2; }", ["8"]),
        ("run() {\n TP=2\n}\nfunction other\n{ TP=4; }\nTP=8\nrun", ["2"]),
        ("run() { TP=2; if [ $X ]; then return; fi; TP=4; }\nrun", ["2", "4"]),
        ("case $1 in 7b) TP=2;; *) echo usage; exit 1;; esac", ["2"]),
        ("#!/bin/bash\n#SBATCH --nodes=2\nTP=8\nif [ $X ]; then TP=2; fi", ["2", "8"]),
        ("#" * 80 + "\nTP=8", ["8"]),
        ("TP=8\nif [ ${SMALL:-0} = 1 ]; then TP=2; fi", ["8"]),
        ("N=8\nif [[ $N -gt 4 ]] && ! [ -z $N ]; then TP=2; else TP=1; fi", ["2"]),
        ("S=7b\nTP=8\n[[ $S == 7* ]] && TP=2 || TP=4", ["2"]),
        ("S=7b\ncase $S in 70b) TP=8;; 7b|8b) TP=2;; *) TP=1; esac", ["2"]),
    ],
)
def test_what_is_not_decided_goes_on_in_both_ways(text: str, values: list[str]) -> None:
    assert sorted(program_words(f"{text}\ntorchrun train.py --tp=$TP")) == sorted([f"--tp={value}"] for value in values)


def test_a_launch_in_a_function() -> None:
    """It knows what is assigned where the function is called."""
    assert program_words("TP=2\nrun() {\n torchrun train.py --tp=$TP\n}\nTP=4\nrun") == [["--tp=4"]]
    with pytest.raises(ConfigError, match=f"function run of the script is called more than {MOST_DEEP} deep"):
        program_words("run() { run; }\nrun")


def test_a_launch_on_each_branch() -> None:
    text = "if [ $X ]; then\ntorchrun train.py --lr 1\nelse\ntorchrun train.py --lr 2\nfi"
    assert program_words(text) == [["--lr", "1"], ["--lr", "2"]]
    assert program_words(f"{text}\ntorchrun train.py --lr 3") == [["--lr", "3"]]


def test_too_many_branches() -> None:
    def branches(count: int) -> str:
        return "".join(f"[ $X ] && A{i}=1\n" for i in range(count))

    assert len(program_words(branches(4) + "torchrun train.py $A0$A1$A2$A3")) == 5
    with pytest.raises(ConfigError, match=f"more than {MOST_WAYS} ways"):
        program_words(branches(13))


def test_a_python_file_may_be_the_value_of_an_option() -> None:
    assert program_words("torchrun --nproc 8 train.py --a 1 --data my.py --b 2") == [["--a", "1", "--data", "my.py", "--b", "2"]]
    assert program_words("python prepare.py --a 0\ntorchrun --nproc 8 train.py --b 2") == [["--b", "2"]]
