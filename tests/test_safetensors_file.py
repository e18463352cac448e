"""Checkpoint folders: written by any number of ranks, read by any other and by other programs; all damage is found."""

import errno
import json
import multiprocessing
import os
import re
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

from model import Llama, LlamaConfig
from runtime import checkpoint_folder, run_folder, safetensors_file
from runtime.checkpoint_folder import open_folder, read_into, write_folder
from runtime.hf_names import Rows, hf_rows
from runtime.safetensors_file import DTYPES, Damaged, open_to_read, read_header, read_rows, write_rows

ODD = LlamaConfig(
    n_layer=2, n_head=4, n_kv_head=2, n_embd=24, ffn_dim=19, vocab_size=13, block_size=8, tie_embeddings=True
)
TINY = LlamaConfig(n_layer=1, n_head=1, n_kv_head=1, n_embd=2, ffn_dim=3, vocab_size=3, block_size=8)  # 4 ranks, 2 rows


@pytest.fixture(autouse=True, scope="module")
def small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        yield use_small_pieces(patch.setattr)


def use_small_pieces(set_attribute=setattr):
    """Tensors of a few kilobytes have several pieces, and models several files."""
    for module in (safetensors_file, checkpoint_folder):
        set_attribute(module, "PIECE_BYTES", 64)
    set_attribute(checkpoint_folder, "FILE_BYTES", 10_000)


def random_bits(shape, dtype, seed):
    """Finite numbers of all sizes."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, generator=generator, dtype=torch.int64).to(dtype)


def whole_states(config):
    """{(state, our name): tensor} of a bfloat16 run: parameters, lower halves, moments, and 8-bit codes with scales."""
    with torch.device("meta"):
        model = Llama(config)
    states = {}
    for i, (name, p) in enumerate(model.named_parameters()):
        kinds = {"": torch.bfloat16, "lower_half": torch.int16, "exp_avg": torch.float32, "codes": torch.uint8}
        states |= {(state, name): random_bits(p.shape, dtype, i) for state, dtype in kinds.items()}
        states["scales", name] = random_bits((len(p), 1), torch.float32, i)
    return states


def rows_of(config, states):
    """The rows that write_folder and read_into get."""
    files = {"model": [], "optimizer": []}
    for (state, name), x in states.items():
        files["optimizer" if state else "model"] += hf_rows(name, x, config, state)
    return files


def published(config, states):
    """{published name: tensor} of whole states; tests/test_convert.py checks these names against transformers."""
    return {row.name: row.tensor for rows in rows_of(config, states).values() for row in rows}


DOCUMENTS = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}" * 100}


def write(path, config, states, group=None):
    return write_folder(path, rows_of(config, states), DOCUMENTS, {"step": 7, "loss": float("nan")}, group)


def read(path, config, like):
    """The states of a folder, shaped and sharded like these."""
    folder = open_folder(path, ("model", "optimizer"))
    assert folder.run["step"] == 7 and folder.run["loss"] is None
    states = {key: torch.zeros_like(x) for key, x in like.items()}
    for rows in rows_of(config, states).values():
        read_into(folder, rows)
    return states


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder and its content, written after an earlier save there was killed."""
    path, states = tmp_path_factory.mktemp("killed"), whole_states(ODD)
    (path / "model.safetensors").write_text("half")
    write(path, ODD, states)
    return path, states


# ----------------------------------------------------------------------------------------------------------------------
# The format


def test_the_safetensors_package_reads_what_we_write(saved):
    path, states = saved
    for stem, rows in rows_of(ODD, states).items():
        index = json.loads((path / f"{stem}.safetensors.index.json").read_text())
        found = {}
        for file in set(index["weight_map"].values()):
            assert os.path.getsize(path / file) < 10_000 + 5000, "at most FILE_BYTES and a header"
            tensors = safetensors.torch.load_file(path / file)
            assert {name for name, of in index["weight_map"].items() if of == file} == tensors.keys()
            found |= tensors
            with safetensors.safe_open(path / file, "pt") as opened:
                assert opened.metadata() == {"format": "pt"}
        expected = {row.name: row.tensor for row in rows}
        assert len(expected) == len(rows) and index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_every_dtype_and_shape_goes_both_ways(tmp_path):
    shapes = [(5, 3, 2), (3,), (), (0, 4), (4, 0), (1, 1)]
    tensors = {
        f"{name}{shape}": random_bits(shape, dtype, 0) for name, dtype in DTYPES.items() for shape in shapes
    }  # odd sizes: each dtype must be aligned all the same
    rows = [Rows(name, x.dtype, x.shape, 0, x) for name, x in tensors.items()]
    write_folder(tmp_path / "x", {"model": rows}, DOCUMENTS, {})
    found = {}
    for file in (tmp_path / "x").glob("*.safetensors"):
        found |= safetensors.torch.load_file(file)
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        assert found[name].dtype == x.dtype and found[name].shape == x.shape
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), x.reshape(-1).view(torch.uint8)), name
    safetensors.torch.save_file(tensors, tmp_path / "theirs", {"any": "thing"})
    with open_to_read(tmp_path / "theirs") as file:
        infos = read_header(file)
        for name, x in tensors.items():
            out = torch.zeros_like(x)
            read_rows(file, infos[name], 0, out)
            assert torch.equal(out.reshape(-1).view(torch.uint8), x.reshape(-1).view(torch.uint8)), name


def test_any_rows_of_a_published_folder_are_read_and_rounded_once(tmp_path):
    x = random_bits((9, 5), torch.float32, 0)
    safetensors.torch.save_file({"x": x}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"hidden_size": 5}')
    folder = open_folder(tmp_path)
    assert folder.run is None and folder.config["hidden_size"] == 5
    for first, last in ((0, 9), (3, 3), (2, 7), (8, 9)):
        out = torch.zeros(last - first, 5, dtype=torch.bfloat16)
        strided = torch.zeros(last - first, 10)[:, ::2]
        read_into(folder, [Rows("x", out.dtype, x.shape, first, out), Rows("x", x.dtype, x.shape, first, strided)])
        assert torch.equal(out, x[first:last].bfloat16()) and torch.equal(strided, x[first:last])
    for name, other, expected in (
        ("x", torch.zeros(9, 4), r"expected x of shape \(9, 4\): .* has shape \(9, 5\)"),
        ("y", torch.zeros(9, 4), r"expected y of shape \(9, 4\): .* has none"),
        ("x", torch.zeros(9, 5, dtype=torch.int32), "expected x in torch.int32: .* has it in torch.float32"),
    ):
        with pytest.raises(ValueError, match=expected) as caught:
            read_into(folder, [Rows(name, other.dtype, other.shape, 0, other)])
        assert caught.type is ValueError, "not Damaged: another checkpoint would be no better"


def test_a_state_with_other_rows_than_its_parameter_is_saved_whole_under_our_name():
    x = torch.zeros(3, 24)
    (rows,) = hf_rows("layers.1.attn.qkv_proj.weight", x, ODD, "projection")
    assert rows.name == "projection.layers.1.attn.qkv_proj.weight" and rows.shape == (3, 24)


# ----------------------------------------------------------------------------------------------------------------------
# Ranks


def same(rows, whole):
    """True if each tensor equals its rows of the whole."""
    return all(
        torch.equal(x.tensor, whole[x.name][x.first : x.first + len(x.tensor)]) for part in rows.values() for x in part
    )


def sharded(config, states, mesh):
    """The states as FSDP shards them; the parameters by FSDP itself."""
    if mesh is None:
        return {key: x.clone() for key, x in states.items()}
    model = Llama(config).bfloat16()
    fully_shard(model, mesh=mesh)
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    found = {key: distribute_tensor(x, mesh, placements, src_data_rank=None) for key, x in states.items()}
    for name, p in model.named_parameters():
        assert p.placements == tuple(placements)
        p.to_local().data.copy_(found["", name].to_local())
        found["", name] = p
    return found


def work_as_rank(rank, folder):
    """Work as one of four ranks: all write, and read with some of the others."""
    torch.set_num_threads(1)
    use_small_pieces()
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 4), rank=rank, world_size=4)
    groups = {n: dist.new_group(range(n)) for n in (1, 2, 3, 4)}
    meshes = {1: None} | {n: DeviceMesh("cpu", list(range(n))) for n in (2, 3, 4)}
    hybrid = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    for config, all_writers, all_readers in ((ODD, (1, 2, 3, 4, "hybrid"), (1, 2, 3, 4)), (TINY, (4,), (1, 3))):
        states = whole_states(config)
        whole = published(config, states)
        for writers in all_writers:
            mesh, group = (hybrid, None) if writers == "hybrid" else (meshes[writers], groups[writers])
            path = folder / f"{config.vocab_size}_{writers}"
            if writers == "hybrid" or rank < writers:
                assert write(path, config, sharded(config, states, mesh), group) == []
            dist.barrier()
            for readers in all_readers:
                mesh = meshes[readers] if rank < readers else None  # the other ranks read all of it
                found = read(path, config, sharded(config, states, mesh))
                assert same(rows_of(config, found), whole), (writers, readers)
            if rank == 0:
                for file in path.glob("*.safetensors"):
                    theirs = safetensors.torch.load_file(file)
                    assert all(torch.equal(x, whole[name]) for name, x in theirs.items())
            dist.barrier()
    check_failures(rank, folder, whole_states(ODD), meshes[4], hybrid)
    dist.barrier()
    dist.destroy_process_group()


def check_failures(rank, folder, states, mesh, hybrid):
    """After a failure of one rank, or between ranks, all ranks raise the same."""

    def raised(kind, function):
        with pytest.raises(kind) as caught:
            function()
        said = [None] * 4
        dist.all_gather_object(said, (type(caught.value), str(caught.value)))
        assert len(set(said)) == 1 and type(caught.value) is kind
        return said[0][1]

    def fail():
        raise OSError(errno.EIO, os.strerror(errno.EIO), "the file")

    mine = sharded(ODD, states, mesh)
    files = rows_of(ODD, mine)
    failing = [row._replace(tensor=fail) for row in files["model"]] if rank == 2 else files["model"]
    lacking = [row._replace(tensor=row.tensor[:0]) for row in files["model"]] if rank == 1 else files["model"]
    path = folder / "failing"
    said = raised(OSError, lambda: write_folder(path, {"model": failing}, DOCUMENTS, {}))
    assert said == "rank 2: Input/output error: the file"
    said = raised(ValueError, lambda: write_folder(path, {"model": files["model"][rank == 3 :]}, DOCUMENTS, {}))
    assert said.startswith("rank 3: the ranks have different tensors for model-00001-of-")
    said = raised(ValueError, lambda: write_folder(path, {"model": lacking}, DOCUMENTS, {}))
    assert "the rows of all ranks are not its" in said
    assert not (path / "run.json").exists()
    write(path, ODD, mine)
    if rank == 0:  # all rows of one rank
        row = next(row for row in files["model"] if row.name == "model.layers.1.mlp.down_proj.weight")
        damage_tensor(path, row.name)
    dist.barrier()
    said = raised(Damaged, lambda: read(path, ODD, mine))
    assert said.startswith("rank 0: ") and "model.layers.1.mlp.down_proj.weight) are not what was saved" in said
    # hybrid sharding: one replica is saved whole, and the difference is reported
    mine = sharded(ODD, states, hybrid)
    if rank == 3:
        mine["exp_avg", "layers.0.attn.qkv_proj.weight"].to_local()[-1] += 1
    name = "exp_avg.model.layers.0.self_attn.v_proj.weight"
    assert write(folder / "differing", ODD, mine) == [name]
    found = read(folder / "differing", ODD, mine)
    assert same(rows_of(ODD, found), published(ODD, states))


def test_any_number_of_ranks_reads_what_any_number_wrote(tmp_path):
    multiprocessing.set_forkserver_preload([__name__])  # one import for four processes
    torch.multiprocessing.start_processes(work_as_rank, (tmp_path,), nprocs=4, start_method="forkserver")


def test_the_ranks_of_a_save_read_their_own_bytes_and_others_at_most_two_pieces_more(tmp_path, monkeypatch):
    x, n_read = random_bits((100, 7), torch.int16, 0), []
    _, infos, _ = safetensors_file.make_header({"x": (x.dtype, x.shape)})
    firsts = (0, 33, 66, 99)
    with open(tmp_path / "x", "w+b", buffering=0) as file:
        pieces = [piece for i in firsts for piece in write_rows(file, infos["x"], i, x[i : i + 33])]
        pread = os.preadv
        monkeypatch.setattr(
            os, "preadv", lambda fd, buffers, at: n_read.append(len(buffers[0])) or pread(fd, buffers, at)
        )
        for first, last in [*((i, min(i + 33, 100)) for i in firsts), (0, 100), (1, 2), (32, 34), (34, 98)]:
            n_read.clear()
            out = torch.zeros(last - first, 7, dtype=torch.int16)
            read_rows(file, infos["x"], first, out, pieces)
            more = sum(n_read) - out.nbytes
            assert torch.equal(out, x[first:last])
            assert more == 0 if first in firsts and last in (*firsts, 100) else 0 < more <= 2 * 64


# ----------------------------------------------------------------------------------------------------------------------
# Damage


def flip(content, at):
    """The content with a bit of the byte there flipped."""
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def damage_tensor(path, name):
    """Flip a bit of the tensor's first byte."""
    for file in path.glob("*.safetensors"):
        with open_to_read(file) as opened:
            infos = read_header(opened)
        if name in infos:
            return file.write_bytes(flip(file.read_bytes(), infos[name].begin))
    raise KeyError(name)


CHANGES = {  # None: the file is missing
    "missing": lambda content: None,
    "its last byte flipped": lambda content: flip(content, len(content) - 1),
    "a byte in its middle flipped": lambda content: flip(content, len(content) // 2),
    "cut": lambda content: content[:-1],
    "longer": lambda content: content + b" ",
    "empty": lambda content: b"",
    "zeroed": lambda content: bytes(len(content)),
    "two bytes swapped": lambda content: content[:-2] + content[:-3:-1],  # their sum stays
    "rows swapped": lambda content: content[:-16] + content[-8:] + content[-16:-8],
}
INDEX = "optimizer.safetensors.index.json"
SHARDS = ["model-00002-of-00002.safetensors", "optimizer-00001-of-00006.safetensors"]
DAMAGE = [(file, what) for file in ("config.json", "run.json", INDEX, *SHARDS) for what in CHANGES]


@pytest.mark.parametrize("file, what", [each for each in DAMAGE if each != ("run.json", "missing")])
def test_every_damage_is_found_and_named(saved, tmp_path, file, what):
    path, states = shutil.copytree(saved[0], tmp_path / "x"), saved[1]
    content = CHANGES[what]((path / file).read_bytes())
    assert content != (path / file).read_bytes()
    (path / file).unlink() if content is None else (path / file).write_bytes(content)
    said = f"{file} is missing" if content is None else file
    with pytest.raises(Damaged, match=re.escape(f"{path}/{said}")):
        read(path, ODD, states)


def header(entries, data=b"", length=None):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets} | more


HOSTILE = {
    "no bytes": (b"", "ends at byte 0"),
    "a huge header": (header({}, length=2**63), "its header has 9223372036854775808 bytes"),
    "a header beyond the file": (header({}, length=3), "its header has 3 bytes"),
    "a cut header": (header({"x": entry()}, length=9), "is not JSON"),
    "UTF-16": (header('{"x": 1}'.encode("utf-16")), "is not JSON"),
    "a list": (header([]), "of type list"),
    "deep nesting": (header(b"[" * 10**6), "is not JSON"),
    "a name twice": (
        header(f'{{"x": {json.dumps(entry())}, "x": {json.dumps(entry(offsets=[8, 16]))}}}'.encode(), bytes(16)),
        "'x' leaves a gap before it",
    ),
    "no entry": (header({"x": 1}), "'x' needs dtype, shape and data_offsets"),
    "a key more": (header({"x": entry(more=1)}, bytes(8)), "and nothing else"),
    "a dtype of a list": (header({"x": entry(dtype=["F32"])}, bytes(8)), "has dtype ['F32']"),
    "another dtype": (header({"x": entry(dtype="F4")}, bytes(8)), "'x' has dtype 'F4', expected one of F64"),
    "a shape too large": (header({"x": entry(shape=[2**60, 2**60])}, bytes(8)), "takes 5316911983139663491615"),
    "a negative shape": (header({"x": entry(shape=[-2, -1])}, bytes(8)), "not valid numbers"),
    "a shape of floats": (header({"x": entry(shape=[2.0])}, bytes(8)), "not valid numbers"),
    "a shape of truths": (header({"x": entry(shape=[True], offsets=[0, 4])}, bytes(4)), "not valid numbers"),
    "too many dimensions": (header({"x": entry(shape=[1] * 9)}, bytes(4)), "not valid numbers"),
    "three offsets": (header({"x": entry(offsets=[0, 8, 16])}, bytes(8)), "not valid numbers"),
    "offsets swapped": (header({"x": entry(offsets=[8, 0])}, bytes(8)), "takes 8 bytes, but data_offsets say -8"),
    "another size": (header({"x": entry(shape=[3])}, bytes(8)), "takes 12 bytes, but data_offsets say 8"),
    "beyond the file": (header({"x": entry()}, bytes(7)), "but its header describes"),
    "more data": (header({"x": entry()}, bytes(9)), "but its header describes"),
    "a gap": (header({"x": entry(offsets=[8, 16])}, bytes(16)), "'x' leaves a gap before it"),
    "an overlap": (header({"x": entry(), "y": entry(offsets=[4, 12])}, bytes(12)), "'y' overlaps the tensor"),
    "a git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
}


@pytest.mark.parametrize("content, said", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_gets_a_message(tmp_path, content, said):
    (tmp_path / "x").write_bytes(content)
    with open_to_read(tmp_path / "x") as file, pytest.raises(Damaged) as caught:
        read_header(file)
    assert said in str(caught.value) and str(tmp_path / "x") in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("index, said", [
    ({}, "has no weight_map"),
    ({"weight_map": {"x": 1}}, "has no weight_map"),
    ({"weight_map": {"x": "../model-1.safetensors"}}, "has no weight_map"),
    ({"weight_map": {"x": "model-1.safetensors", "y": "model-1.safetensors"}}, "says that 'y' is in model-1"),
    ({"weight_map": {"x": "other.safetensors"}}, "other.safetensors is missing"),
], ids=str)  # fmt: skip
def test_an_index_is_checked(tmp_path, index, said):
    safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / "model-1.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-1.safetensors"}}')
    assert open_folder(tmp_path).tensors.keys() == {"x"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Damaged, match=said):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    "digests", [None, [], {"config.json": 1}, {"config.json": ["1"]}, {"config.json": [f"{2**40} {'0' * 64}"]}], ids=str
)
def test_invalid_digests_count_as_damage(saved, tmp_path, digests):
    path = shutil.copytree(saved[0], tmp_path / "x")
    (path / "run.json").write_bytes(checkpoint_folder._seal(json.dumps({"digests": digests}, indent=2).encode()))
    with pytest.raises(Damaged, match="run.json"):
        open_folder(path)


def test_a_full_disk_is_found_before_writing_and_an_error_is_no_damage(saved, tmp_path, monkeypatch):
    def no_space(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "file").write_text("")
    for module, name, replaced, folder, said in (
        (os, "pwritev", no_space, "x", r"No space left on device: .*model-00001-of-00002.safetensors"),
        (shutil, "disk_usage", lambda path: (10**9, 10**9 - 1000, 1000), "x", "the disk is full: .* needs 0.000 GiB"),
        (os, "preadv", no_space, None, "No space left"),  # an OSError, not Damaged, which is a ValueError
        (os, "fsync", os.fsync, "file/x", "Not a directory"),
    ):
        with monkeypatch.context() as patch, pytest.raises(OSError, match=said):
            patch.setattr(module, name, replaced)
            write(tmp_path / folder, ODD, saved[1]) if folder else read(saved[0], ODD, saved[1])


def test_a_checkpoint_is_on_disk_before_it_has_its_name_and_then_its_name_is(saved, tmp_path, monkeypatch):
    fsync, pwritev, rename, synced, unsynced, found = os.fsync, os.pwritev, Path.rename, [], set(), []
    name = lambda file: os.readlink(f"/proc/self/fd/{file}")  # noqa: E731
    monkeypatch.setattr(os, "pwritev", lambda file, *more: unsynced.add(name(file)) or pwritev(file, *more))
    note = lambda file: (synced.append(name(file)), unsynced.discard(name(file)))  # noqa: E731
    monkeypatch.setattr(os, "fsync", lambda file: (note(file), fsync(file)))
    monkeypatch.setattr(Path, "rename", lambda *paths: (found.extend(synced), synced.clear(), rename(*paths)))
    partial = tmp_path / "step_000007.partial"
    write(partial, ODD, saved[1])
    files = {str(path) for path in partial.iterdir()}
    run_folder.commit(partial, tmp_path / "step_000007")
    assert found[-1] == str(partial) and files < set(found) and not unsynced
    assert synced == [str(tmp_path)]


def test_a_system_call_that_moves_less_than_it_was_asked_is_followed_by_others(tmp_path, monkeypatch):
    states = whole_states(ODD)
    for name in ("pwritev", "preadv"):
        whole = getattr(os, name)
        monkeypatch.setattr(os, name, lambda file, x, offset, call=whole: call(file, [x[0][:40]], offset))
    write(tmp_path / "x", ODD, states)
    assert all(torch.equal(x, states[key]) for key, x in read(tmp_path / "x", ODD, states).items())
