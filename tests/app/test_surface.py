"""The command line's surface, frozen: what scripts, fcp.yaml and environments out there may rely on.

A new option is added here by hand; one that vanishes from here breaks somebody's job.
"""

from __future__ import annotations

import shlex

import pytest
from typer.testing import CliRunner

from docs.hooks.reference import CommandEntry, command_entries
from fcp_cli.app import app

# Arguments by their metavar, then options by all their spellings.
SURFACE = {
    "": """
        --config --no-config --quiet -q --verbose -v --version --install-completion --show-completion
    """,
    "manifest": """
    """,
    "manifest build": """
        SOURCE --output -o --tokenizer --kind --column --include --exclude --train-on
        --processor --bad-rows --mask --vocab-size --workers --shard --json
    """,
    "manifest merge": """
        PART --output -o --json
    """,
    "manifest show": """
        MANIFEST --length-column --json
    """,
    "profile": """
        --model -m --cluster --sync --zero --shard-ranks --reduce --precision --recompute --loss --offload
        --freeze-vision --lora --freeze --budget-minutes --max-length --degrees --ranks --device --layers --samples --fresh
        --from-samples --nodes --devices-per-node --analytic --attention-kernel --tensor-parallel --pipeline-parallel --expert-parallel
        --output -o --json
    """,
    "profile show": """
        PROFILE --lengths --degrees --json
    """,
    "profile fit": """
        RUN_DIR --output -o --profile --plan --skip-steps --json
    """,
    "demo": """
        --output -o --json
    """,
    "plan": """
        MANIFEST --profile --model --cluster --attention-kernel --ranks --ranks-per-node --tokens-per-rank --rank-speeds --sync --headroom --attention
        --tensor-parallel --pipeline-parallel --virtual-stages --padded-rings --no-padded-rings --phase --global-batch-tokens --encoder-balance
        --encoder-ranks --zero --shard-ranks --reduce
        --precision --recompute --loss --offload --freeze-vision --lora --freeze --global-batch-size --steps --epochs --seed
        --shuffle --no-shuffle --max-length --overlong --last-batch --length-column --output -o --solver --resume
        --mix --continue-from --max-degree --max-groups --max-peers --workers --json
        --device-hour-price
    """,
    "launch": """
        -- SCRIPT ARGS --model --plan --manifest --synthetic --ranks --device --run-dir --resume --inject --probe
        --no-probe --dry-run --grace --rank-timeout --attention-kernel --numa-binding --explain --preflight --json --target --launcher --output -o --force --template
        --hostfile --setup --sbatch-option --srun-option --image --mount --namespace --request --node-selector --pull-secret
        --toleration --env --env-secret --accelerator
        --rdma-resource --host-network --shm-size
        --python --job-name --nodes --node-rank --master-addr
        --master-port --join-timeout --weights --export-every --lora --freeze
        --eval-manifest --eval-plan --eval-every --wandb
        --steps --learning-rate --lr-schedule --warmup-steps --decay-steps --wsd-decay-ratio
        --min-learning-rate-ratio --weight-decay --zero
        --shard-ranks --reduce --precision --recompute --loss --offload --max-grad-norm --freeze-vision
        --on-nan --grad-ring-dtype --seed
        --checkpoint-every --keep --accept-unrecorded --async-save --no-async-save --length-column --log-every --bad-rows --decode-workers
        --online --profile --global-batch-size --global-batch-tokens --ahead --stream-begins
        --refit-every
    """,
    "check": """
        PLAN --manifest --length-column --json
    """,
    "inspect": """
        PLAN --step --why --manifest --json
    """,
    "compare": """
        MANIFEST --profile --model --cluster --attention-kernel --ranks --ranks-per-node --tokens-per-rank --rank-speeds --sync --headroom --attention
        --tensor-parallel --pipeline-parallel --virtual-stages --padded-rings --no-padded-rings --phase --global-batch-tokens --encoder-balance
        --encoder-ranks --zero --shard-ranks --reduce
        --precision --recompute --loss --offload --freeze-vision --lora --freeze --global-batch-size --steps --epochs --seed
        --shuffle --no-shuffle --max-length --overlong --last-batch --length-column --solvers --milp-seconds --json
        --device-hour-price
    """,
    "verify": """
        PLAN --plan --steps --first-step --max-length --json
    """,
    "watch": """
        RUN_DIR --every --interval --once --json
    """,
    "report": """
        PLAN|RUN_DIR --metrics --output -o --manifest --json
    """,
    "env": """
        --json
    """,
    "selftest": """
        --device --ranks --nodes --devices-per-node --quick --model --limit --output -o --json
    """,
    "list": """
        KIND --json
    """,
}
COMMANDS = {" ".join(command.words): command for command in command_entries()}


def test_commands_stand_in_the_order_in_which_a_new_user_meets_them() -> None:
    assert list(COMMANDS) == list(SURFACE)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_command_has_exactly_its_known_arguments_and_options(command: CommandEntry) -> None:
    words = " ".join(word for option in command.options for word in option.flags or (option.metavar,))
    assert sorted(words.split()) == sorted(SURFACE[" ".join(command.words)].split())


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_environment_and_config_names_follow_from_the_flag(command: CommandEntry) -> None:
    if not command.words:
        return
    for option in command.options:
        flag = next((flag for flag in option.flags if flag.startswith("--")), None)
        variable = "_".join(("FCP", *command.words, str(flag)[2:])).upper().replace("-", "_")
        assert option.environment == (variable if flag else None)
        assert option.config_key == (".".join((*command.words, flag[2:])) if flag else None)


@pytest.mark.lengthy
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_help_fits_80_columns_and_ends_with_examples_of_that_command(command: CommandEntry) -> None:
    shown = CliRunner().invoke(app, [*command.words, "--help"], env={"COLUMNS": "80"}).output
    text, _, examples = shown.partition("\nExamples:\n")
    assert max(map(len, text.splitlines())) <= 80
    assert [line.strip() for line in examples.splitlines() if line.startswith("  ")] == list(command.examples)
    assert len(command.examples) >= 2
    for example in command.examples:
        own_words = shlex.split(example.partition(" -- ")[0])
        assert own_words[: 1 + len(command.words)] == ["fcp", *command.words]
        meant = (one for one in COMMANDS.values() if tuple(own_words[1 : 1 + len(one.words)]) == one.words)
        runs = max(meant, key=lambda one: len(one.words))
        assert {word for word in own_words if word.startswith("-")} <= set(SURFACE[" ".join(runs.words)].split())


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_metavars_and_defaults_are_written_one_way(command: CommandEntry) -> None:
    for option in command.options:
        assert option.help.endswith(".")
        assert "efault" not in option.help
        assert not set("<>[]{} ") & set(option.metavar.removeprefix("-- SCRIPT "))
