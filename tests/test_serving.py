"""The vLLM command: what our drafters become there, and what has no counterpart."""

import json
import shlex

import pytest

from quasar_lab import (
    AdaptiveDrafter,
    LayerSkipDrafter,
    ModelDrafter,
    NGramDrafter,
    SuffixDrafter,
    UserError,
    vllm_command,
)
from quasar_lab.cli import main


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def speculation(command) -> dict:
    return json.loads(option(command.arguments, "--speculative-config"))


class TestCommand:
    def test_on_a_cpu(self, tiny_folder) -> None:
        """The forms that the CPU build runs: its own `vllm serve` fails."""
        drafter = NGramDrafter(match="first")
        command = vllm_command(tiny_folder, drafter, device="cpu", port=8123, max_model_len=1024)
        assert command.arguments[:4] == [
            "python", "-m", "vllm.entrypoints.openai.api_server", "--model",
        ]  # fmt: skip
        assert option(command.arguments, "--host") == "127.0.0.1"
        assert option(command.arguments, "--port") == "8123"
        assert option(command.arguments, "--dtype") == "float32"
        assert option(command.arguments, "--max-model-len") == "1024"
        assert "--enforce-eager" in command.arguments
        assert speculation(command) == {
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        }
        assert command.environment == {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

    def test_the_text_is_what_a_shell_reads(self, tiny_folder) -> None:
        command = vllm_command(tiny_folder, NGramDrafter(match="first"), device="cpu")
        [line] = [line for line in str(command).splitlines() if not line.startswith("#")]
        variables = [f"{name}={value}" for name, value in command.environment.items()]
        assert shlex.split(line) == [*variables, *command.arguments]

    def test_on_one_and_several_gpus(self, tiny_folder) -> None:
        assert vllm_command(tiny_folder).arguments[:3] == ["vllm", "serve", str(tiny_folder)]
        assert "--speculative-config" not in vllm_command(tiny_folder).arguments
        command = vllm_command(tiny_folder, num_gpus=4)
        assert option(command.arguments, "--tensor-parallel-size") == "4"
        assert option(command.arguments, "--dtype") == "bfloat16"

    def test_on_several_nodes_without_ray(self, tiny_folder) -> None:
        command = vllm_command(tiny_folder, num_gpus=2, num_nodes=3, head_address="10.0.0.1")
        assert [option(list(node), "--node-rank") for node in command.nodes] == ["0", "1", "2"]
        assert ["--headless" in node for node in command.nodes] == [False, True, True]
        assert {option(list(node), "--master-addr") for node in command.nodes} == {"10.0.0.1"}
        assert option(command.arguments, "--pipeline-parallel-size") == "3"
        assert "# on node 2" in str(command) and "same path" in str(command)

    def test_on_several_nodes_with_ray(self, tiny_folder) -> None:
        command = vllm_command(tiny_folder, num_nodes=2, backend="ray", head_address="head")
        assert command.before == ("ray start --head --port=6379", "ray start --address=head:6379")
        assert len(command.nodes) == 1
        assert option(command.arguments, "--distributed-executor-backend") == "ray"
        assert str(command).count("ray start") == 2

    @pytest.mark.parametrize(
        "settings, message",
        [
            ({"device": "tpu"}, "device is 'tpu'"),
            ({"num_gpus": 3}, r"3 GPUs cannot share 4 attention heads .*: choose from 1, 2, 4"),
            ({"num_nodes": 4}, "4 nodes cannot share 3 layers: choose at most 3"),
            ({"num_nodes": 2, "head_address": ""}, "head_address is ''"),
            ({"num_nodes": 2, "head_address": "a; rm -r b"}, "head_address is 'a; rm"),
            ({"max_model_len": 4097}, "max_model_len is 4097: the model takes 4096 at most"),
            ({"num_gpus": 0}, "must be at least 1"),
            ({"device": "cpu", "num_gpus": 2}, 'for device="cuda"'),
            ({"num_nodes": 2, "backend": "mpi"}, "choose from mp, ray"),
            ({"port": 0}, "port is 0"),
            ({"max_model_len": 0}, "max_model_len is 0"),
        ],
    )
    def test_wrong_settings(self, settings, message, tiny_folder) -> None:
        with pytest.raises(UserError, match=message):
            vllm_command(tiny_folder, **settings)

    def test_gpus_share_all_parts_of_a_layer(self, tiny_folder, tmp_path) -> None:
        """vLLM stops with an assertion where a part cannot be split."""
        for file in tiny_folder.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((tmp_path / "config.json").read_text())

        def choice(**entries: int) -> str:
            (tmp_path / "config.json").write_text(json.dumps({**config, **entries}))
            with pytest.raises(UserError) as raised:
                vllm_command(tmp_path, num_gpus=5)
            return str(raised.value).rpartition("choose from ")[2]

        assert choice(num_attention_heads=12, num_key_value_heads=12) == "1, 2, 3, 4, 6, 12"
        # four key-value heads: two GPUs may hold a copy of one, three of six could not
        assert choice(num_attention_heads=12, num_key_value_heads=4) == "1, 2, 4, 12"
        # the default model: 9 heads, but an MLP of 1,536
        config["intermediate_size"] = 1536
        assert choice(num_attention_heads=9, num_key_value_heads=3) == "1, 3"

    def test_a_stretched_context_may_be_longer(self, tiny_folder, tmp_path) -> None:
        for file in tiny_folder.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((tmp_path / "config.json").read_text())
        config["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert option(vllm_command(tmp_path, max_model_len=8192).arguments, "--max-model-len")

    def test_the_folder_must_hold_what_vllm_can_load(self, tiny_folder, tmp_path) -> None:
        with pytest.raises(UserError, match="quasar-lab export"):
            vllm_command(tmp_path / "none")
        with pytest.raises(UserError, match="there is no folder"):
            vllm_command("x" * 300)  # too long a name for a file system
        for file in tiny_folder.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "compressed-tensors"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match="status is None"):
            vllm_command(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": "x"}))
        with pytest.raises(UserError, match="quantization_config is 'x'"):
            vllm_command(tmp_path)


class TestDrafters:
    def test_which_match_is_said(self, tiny_folder) -> None:
        """vLLM takes the earliest occurrence; ours takes the latest by default."""
        command = vllm_command(tiny_folder, NGramDrafter(max_ngram=4, min_ngram=2))
        assert speculation(command)["prompt_lookup_max"] == 4
        assert any("earliest" in note for note in command.notes)
        assert not vllm_command(tiny_folder, NGramDrafter(match="first")).notes

    def test_suffix(self, tiny_folder) -> None:
        command = vllm_command(tiny_folder, SuffixDrafter(12, 1.5, min_match=3))
        settings = speculation(command)
        assert settings["num_speculative_tokens"] == 12
        assert settings["suffix_decoding_max_spec_factor"] == 1.5
        assert any("min_match = 3" in note for note in command.notes)

    def test_a_model_is_named_by_its_folder(self, tiny_folder, tiny_language_model) -> None:
        drafter = ModelDrafter(tiny_language_model, 3, drafter=NGramDrafter())
        command = vllm_command(tiny_folder, drafter)
        assert speculation(command) == {
            "method": "draft_model",
            "model": str(tiny_folder),
            "num_speculative_tokens": 3,
        }
        assert any("own drafter" in note for note in command.notes)

    def test_what_has_no_counterpart_is_refused(self, tiny_folder, tiny_language_model) -> None:
        for drafter in (
            LayerSkipDrafter(tiny_language_model),
            AdaptiveDrafter(NGramDrafter(16), 16),
        ):
            with pytest.raises(UserError, match="has no counterpart in vLLM"):
                vllm_command(tiny_folder, drafter)


class TestCommandLine:
    def test_it_prints_the_command(self, tiny_folder, capsys) -> None:
        command = ["serve-command", str(tiny_folder), "--device", "cpu", "--ngram", "2:4"]
        assert main(command) == 0
        printed = capsys.readouterr().out.splitlines()[-1]
        drafter = NGramDrafter(max_ngram=4, min_ngram=2, match="first")
        assert (
            shlex.split(printed)[2:] == vllm_command(tiny_folder, drafter, device="cpu").arguments
        )
        assert main([*command[:4], "--drafter", "none", "--json"]) == 0
        assert "--speculative-config" not in json.loads(capsys.readouterr().out)["nodes"][0]

    def test_wrong_input_is_one_line(self, tiny_folder, capsys) -> None:
        assert main(["serve-command", str(tiny_folder), "--drafter", "eagle"]) == 2
        assert "choose from ngram, suffix, none" in capsys.readouterr().err
        for more, message in (
            (["--drafter", "suffix", "--ngram", "2:3"], "--ngram is for --drafter ngram"),
            (["--drafter", "none", "--draft-tokens", "3"], "--draft-tokens is for a drafter"),
            (["--draft-tokens", "0"], "num_draft_tokens is 0"),
        ):
            assert main(["serve-command", str(tiny_folder), *more]) == 2
            printed = capsys.readouterr()
            assert message in printed.err and printed.err.count("\n") == 1 and not printed.out
