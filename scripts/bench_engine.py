"""Time of one layer, forward and both gradients: the engine's sparse ops against TensorFlow's dense ones.

Each side is a process of its own (dense with oneDNN on, dense with oneDNN off, sparse, and on request PyTorch dense and
SparseProp); the sides take turns within each round, and medians over the rounds are compared. The ratio is against the
faster of TensorFlow's two dense settings. Beside it stands how far the sparse kernel is from what the machine can do.

    python scripts/bench_engine.py --layers dense --picture engine.png
    python scripts/bench_engine.py --layers conv --sparsity 0.9 0.98 --torch --sparseprop ~/sparseprop
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

SPARSITIES = (0.8, 0.9, 0.95, 0.98, 0.99)
TARGETS = {"dense": (1.4, 2.5, 4.5, 7, 10), "conv": (1.1, 1.9, 3.3, 5.5, 7.5), "pointwise": (1.2, 2, 3.5, 6, 8)}
CALL_SECONDS = 0.05


@dataclass(frozen=True)
class Layer:
    """One row: a Dense kernel (size, size), or a convolution of `kernel` x `kernel` on pixels x pixels images."""

    kind: str
    size: int
    batch: int
    kernel: int = 1
    pixels: int = 1

    @property
    def name(self) -> str:
        if self.kind == "dense":
            return f"Dense {self.size}x{self.size}, batch {self.batch}"
        return f"Conv2D {self.kernel}x{self.kernel}, {self.size} ch, {self.pixels} px, batch {self.batch}"

    @property
    def lanes(self) -> int:
        """How often a kept weight is used in one forward pass."""
        return self.batch * self.pixels**2

    @property
    def weights(self) -> int:
        return self.kernel**2 * self.size**2

    def target(self, sparsity: float) -> float | None:
        row = self.kind if self.kernel > 1 or self.kind == "dense" else "pointwise"
        return dict(zip(SPARSITIES, TARGETS[row], strict=True)).get(sparsity)

    def arrays(self, sparsity: float | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Input, output gradient, kernel in Keras' shapes, and its mask."""
        rng = np.random.default_rng(0)
        spatial = () if self.kind == "dense" else (self.pixels, self.pixels)
        x = rng.normal(size=(self.batch, *spatial, self.size)).astype(np.float32)
        window = () if self.kind == "dense" else (self.kernel, self.kernel)
        kernel = rng.normal(size=(*window, self.size, self.size)).astype(np.float32) / np.sqrt(self.weights / self.size)
        keep = np.ones(kernel.shape, bool)
        if sparsity is not None:
            order = rng.permutation(kernel.size)[: round(sparsity * kernel.size)]
            keep.reshape(-1)[order] = False
        return x, rng.normal(size=x.shape).astype(np.float32), np.where(keep, kernel, 0).astype(np.float32), keep


def layers(which: str) -> list[Layer]:
    dense = [Layer("dense", size, batch) for size in (1024, 2048) for batch in (64, 128)]
    conv = [Layer("conv", size, 32, 3, pixels) for size, pixels in ((64, 32), (128, 16), (256, 8))]
    conv.append(Layer("conv", 256, 32, 1, 16))
    return {"dense": dense, "conv": conv, "all": dense + conv}[which]


# Worker: one side ---------------------------------------------------------------------------------------------------


def tensorflow_call(layer: Layer, sparsity: float | None) -> Callable[[int], Any]:
    """A function that runs forward and both gradients so many times inside one graph."""
    import tensorflow as tf

    arrays = layer.arrays(sparsity)
    x, dy = tf.constant(arrays[0]), tf.constant(arrays[1])
    kernel, keep = arrays[2:]
    if sparsity is None:
        weight = tf.Variable(kernel)
        forward = (lambda: x @ weight) if layer.kind == "dense" else (lambda: tf.nn.conv2d(x, weight, 1, "SAME"))
    else:
        weight = tf.Variable(kernel[keep])
        forward = sparse_forward(layer, x, weight, keep)

    def once() -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = forward()
        return y, *tape.gradient(y, [x, weight], dy)

    @tf.function(autograph=False)
    def loop(repeats: tf.Tensor) -> Any:
        return tf.while_loop(
            lambda done, *_: done < repeats, lambda done, *_: (done + 1, *once()), (1, *once()), parallel_iterations=1
        )

    return lambda repeats: loop(tf.constant(repeats))[0].numpy()


def sparse_forward(layer: Layer, x: Any, values: Any, keep: np.ndarray) -> Callable[[], Any]:
    if layer.kind == "dense":
        from sparsekit.engine.functions import Structure, sparse_dense

        structure = Structure.from_mask(keep)
        return lambda: sparse_dense(x, values, structure)
    from sparsekit.engine.conv_functions import ConvStructure, sparse_conv2d

    convolution = ConvStructure.from_mask(keep, padding="same")
    return lambda: sparse_conv2d(x, values, convolution)


def torch_call(layer: Layer, sparsity: float | None) -> Callable[[int], None]:
    """The same in PyTorch: its dense layer, or SparseProp's faster kernel."""
    import torch

    arrays = layer.arrays(sparsity)
    if layer.kind == "dense":
        x, dy, weight = arrays[0], arrays[1], arrays[2].T
        module = torch.nn.Linear(layer.size, layer.size, bias=False)
    else:
        x, dy = (array.transpose(0, 3, 1, 2) for array in arrays[:2])
        weight = arrays[2].transpose(3, 2, 0, 1)
        module = torch.nn.Conv2d(layer.size, layer.size, layer.kernel, padding=layer.kernel // 2, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.from_numpy(np.ascontiguousarray(weight)))
    operand = torch.from_numpy(np.ascontiguousarray(x)).requires_grad_()
    gradient = torch.from_numpy(np.ascontiguousarray(dy))
    modules = [module]
    if sparsity is not None:
        from sparseprop.modules import SparseConv2d, SparseLinear

        if layer.kind == "dense":
            modules = [SparseLinear.from_dense(module)]
        else:
            modules = [SparseConv2d.from_dense(module, vectorizing_over_on=over) for over in (False, True)]

    def call(module: Any, repeats: int) -> None:
        for _ in range(repeats):
            operand.grad = None
            module.zero_grad()
            module(operand).backward(gradient)

    def seconds(module: Any) -> float:
        call(module, 1)
        began = time.perf_counter()
        call(module, 2)
        return time.perf_counter() - began

    best = min(modules, key=lambda module: min(seconds(module) for _ in range(3)))
    return lambda repeats: call(best, repeats)


def work(side: str) -> None:
    """Answer the controller's lines: prepare a layer, time a prepared layer once."""
    make = torch_call if side in ("torch", "sparseprop") else tensorflow_call
    ready: dict[str, tuple[Callable[[int], None], int]] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "forget":
            ready.clear()
            answer = 0.0
        elif order["do"] == "prepare":
            call = make(Layer(**order["layer"]), order["sparsity"])
            call(2)
            began = time.perf_counter()
            call(4)
            ready[order["key"]] = call, max(2, min(400, int(CALL_SECONDS * 4 / (time.perf_counter() - began))))
            answer = 0.0
        else:
            call, repeats = ready[order["key"]]
            began = time.perf_counter()
            call(repeats)
            answer = (time.perf_counter() - began) / repeats * 1e3
        print(json.dumps(answer), flush=True)


class Side:
    """The controller's end of a worker process."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": str(os.cpu_count())}
        if name.startswith("onednn"):
            environment["TF_ENABLE_ONEDNN_OPTS"] = "1" if name == "onednn on" else "0"
        if name == "sparseprop":
            environment["PYTHONPATH"] = f"{options.sparseprop}{os.pathsep}{environment.get('PYTHONPATH', '')}"
        command = [sys.executable, __file__, "--side", name]
        errors = None if options.verbose else subprocess.DEVNULL
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )

    def ask(self, **order: Any) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the side '{self.name}' died; run with --verbose to see why")
        return json.loads(answer)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# Roofline -----------------------------------------------------------------------------------------------------------

ROOFLINE = r"""
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>
#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
typedef float Vector __attribute__((vector_size(kBytes)));
static double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
// Ten sums under way hide the latency of a multiply-add; values change, so that nothing can be left out.
static double Peak() {
  Vector s0{}, s1{}, s2{}, s3{}, s4{}, s5{}, s6{}, s7{}, s8{}, s9{};
  Vector factor = Vector{} + 0.999f, term = Vector{} + 0.1f;
  const long count = 2000000;
  const double began = Now();
  for (long i = 0; i < count; ++i) {
    s0 = s0 * factor + term; s1 = s1 * factor + term; s2 = s2 * factor + term; s3 = s3 * factor + term;
    s4 = s4 * factor + term; s5 = s5 * factor + term; s6 = s6 * factor + term; s7 = s7 * factor + term;
    s8 = s8 * factor + term; s9 = s9 * factor + term;
  }
  const double seconds = Now() - began;
  volatile float sink = (s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7 + s8 + s9)[0];
  (void)sink;
  return count * 10.0 * 2 * (kBytes / 4) / seconds / 1e9;
}
static double Bandwidth(size_t bytes) {
  Vector* data = static_cast<Vector*>(aligned_alloc(4096, bytes));
  const size_t count = bytes / kBytes;
  for (size_t i = 0; i < count; ++i) data[i] = Vector{};
  Vector s[8] = {};
  const int repeats = 1 + 300000000 / bytes;
  const double began = Now();
  for (int r = 0; r < repeats; ++r) {
    for (size_t i = 0; i < count; i += 8) {
      for (int j = 0; j < 8; ++j) s[j] += data[i + j];
    }
    asm volatile("" ::: "memory");
  }
  const double seconds = Now() - began;
  volatile float sink = (s[0] + s[1] + s[2] + s[3] + s[4] + s[5] + s[6] + s[7])[0];
  (void)sink;
  free(data);
  return static_cast<double>(repeats) * bytes / seconds / 1e9;
}
int main(int, char** argv) {
  const int threads = atoi(argv[1]);
  for (size_t bytes : {size_t{0}, size_t{16} << 10, size_t{512} << 10, size_t{16} << 20, size_t{256} << 20}) {
    std::vector<double> results(threads);
    std::vector<std::thread> pool;
    // The best of several short tries: what the core can do while nobody else has it.
    for (int t = 0; t < threads; ++t) {
      pool.emplace_back([&, t] {
        for (int i = 0; i < 15; ++i) results[t] = std::max(results[t], bytes ? Bandwidth(bytes) : Peak());
      });
    }
    for (auto& thread : pool) thread.join();
    double sum = 0;
    for (double result : results) sum += result;
    printf("%f\n", sum);
  }
}
"""


@dataclass(frozen=True)
class Roofline:
    """Of all cores together: multiply-adds in GFLOP/s, reads in GB/s of 16 KiB, 512 KiB, 16 MiB and 256 MiB a core."""

    peak: float
    first: float
    second: float
    third: float
    memory: float


def roofline() -> Roofline:
    from sparsekit.engine import build

    command = build.compiler()
    if command is None:
        raise SystemExit(f"the engine cannot be timed: {build.reason()}")
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "roofline.cc", Path(folder) / "roofline"
        source.write_text(ROOFLINE)
        flags = [
            "-O3",
            "-std=c++17",
            "-ffp-contract=fast",
            "-fno-tree-slp-vectorize",
            *build._probe(command)[0],
            "-pthread",
        ]
        subprocess.run([*command, *flags, str(source), "-o", str(program)], check=True)
        lines = subprocess.run([program, str(os.cpu_count())], check=True, capture_output=True, text=True).stdout
    return Roofline(*map(float, lines.split()))


# Controller ---------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> list[dict]:
    """One row a layer and sparsity: medians in milliseconds by side."""
    from rich.progress import Progress

    chosen = layers(options.layers)
    if importlib.util.find_spec("sparsekit.engine.conv_functions") is None:
        chosen = [layer for layer in chosen if layer.kind == "dense"]
    dense_sides = ["onednn on", "onednn off"] + ["torch"] * options.torch
    sparse_sides = ["sparse"] + ["sparseprop"] * bool(options.sparseprop)
    sides = {name: Side(name, options) for name in dense_sides + sparse_sides}
    rows = []
    with Progress(transient=True) as progress:
        task = progress.add_task("timing", total=len(chosen) * options.rounds)
        for layer in chosen:
            runs = [(name, None) for name in dense_sides]
            runs += [(name, sparsity) for sparsity in options.sparsity for name in sparse_sides]
            for name, sparsity in runs:
                sides[name].ask(do="prepare", key=str(sparsity), layer=asdict(layer), sparsity=sparsity)
            times: dict[tuple[str, float | None], list[float]] = {run: [] for run in runs}
            for _ in range(options.rounds):
                for name, sparsity in runs:
                    times[name, sparsity].append(sides[name].ask(do="time", key=str(sparsity)))
                progress.advance(task)
            medians = {run: statistics.median(values) for run, values in times.items()}
            least = {run: min(values) for run, values in times.items()}
            for sparsity in options.sparsity:
                found = {name: medians[name, None] for name in dense_sides}
                found |= {name: medians[name, sparsity] for name in sparse_sides}
                best = min(least["onednn on", None], least["onednn off", None]) / least["sparse", sparsity]
                rows.append({"layer": layer, "sparsity": sparsity, "best_ratio": best} | found)
            for side in sides.values():
                side.ask(do="forget")
    for side in sides.values():
        side.close()
    return rows


def show(rows: list[dict], roof: Roofline) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Forward and both gradients of one layer, median milliseconds")
    columns = ["layer", "sparsity", "sparse", "faster dense\n(oneDNN)", "ratio", "target", "best of\nrounds"]
    columns += ["GFLOP/s\n(of peak)", "GB/s of lanes\n(of level 2)", "GB/s of tensors\n(of level 3)"]
    extra = [name for name in ("torch", "sparseprop") if name in rows[0]]
    columns += [f"{name},\nits time / ours" for name in extra]
    for column in columns:
        table.add_column(column, justify="left" if column == "layer" else "right", no_wrap=True)
    before = None
    for row in rows:
        layer, seconds = row["layer"], row["sparse"] * 1e-3
        dense = min(("onednn on", "onednn off"), key=row.__getitem__)
        ratio, target = row[dense] / row["sparse"], layer.target(row["sparsity"])
        uses = layer.weights * (1 - row["sparsity"]) * layer.lanes
        # Three multiply-adds a use (output, input gradient, value gradient) and two reads of a batch lane.
        flops, lanes = 6 * uses / seconds / 1e9, 8 * uses / seconds / 1e9
        # The input is read twice, the output gradient once; the two results are written to memory that is read before.
        tensors = 7 * 4 * layer.lanes * layer.size / seconds / 1e9
        cells = [
            layer.name if layer != before else "",
            f"{row['sparsity']:.0%}",
            f"{row['sparse']:.3f}",
            f"{row[dense]:.3f}, {dense.split()[1]:3}",
            f"[{'green' if target is None or ratio >= target else 'red'}]{ratio:.1f}x[/]",
            "" if target is None else f"{target:g}x",
            f"{row['best_ratio']:.1f}x",
            f"{flops:.0f} ({flops / roof.peak:.0%})",
            f"{lanes:.0f} ({lanes / roof.second:.0%})",
            f"{tensors:.0f} ({tensors / roof.third:.0%})",
            *(f"{row[name] / row['sparse']:.2f}" for name in extra),
        ]
        table.add_row(*cells, end_section=False)
        before = layer
    console = Console(width=max(150, Console().width))
    console.print(table)
    console.print(
        f"{os.cpu_count()} cores together: {roof.peak:.0f} GFLOP/s of multiply-adds; reads of {roof.first:.0f} GB/s "
        f"from the first level cache, {roof.second:.0f} from the second, {roof.third:.0f} of 16 MiB a core (level 3), "
        f"{roof.memory:.0f} of 256 MiB a core."
    )


def draw(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    names = list(dict.fromkeys(row["layer"].name for row in rows))
    for name in names:
        mine = [row for row in rows if row["layer"].name == name]
        ratios = [min(row["onednn on"], row["onednn off"]) / row["sparse"] for row in mine]
        axes.plot([1 - row["sparsity"] for row in mine], ratios, "o-", label=name)
    densities = sorted({1 - row["sparsity"] for row in rows})
    axes.plot(densities, [1 / density for density in densities], "k--", label="1 / density")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="density (log)", ylabel="times faster than dense (log)")
    axes.set_xticks(densities, [f"{density:.0%}" for density in densities])
    axes.minorticks_off()
    axes.set_yticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
    axes.invert_xaxis()
    axes.set_title("Forward and both gradients of one layer, against the faster dense setting")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def check_torch(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Say before any timing what the sides in PyTorch lack."""
    if (options.torch or options.sparseprop) and importlib.util.find_spec("torch") is None:
        parser.error("PyTorch is not installed; install it, or add its folder to PYTHONPATH")
    if options.sparseprop:
        folder = options.sparseprop = options.sparseprop.expanduser().resolve()
        if not (folder / "sparseprop" / "__init__.py").is_file() or not any(folder.glob("backend*.so")):
            parser.error(
                f"{folder} does not hold SparseProp; needed are the package of IST-DASLab/sparseprop, sparseprop/, and "
                "beside it backend*.so, compiled from sparseprop/backend.cpp as its setup.py says"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", choices=("dense", "conv", "all"), default="all")
    parser.add_argument("--sparsity", type=float, nargs="+", default=list(SPARSITIES))
    parser.add_argument("--rounds", type=int, default=9, help="7 or more for a figure that is to be quoted")
    parser.add_argument("--torch", action="store_true", help="time PyTorch's dense layers, too")
    parser.add_argument(
        "--sparseprop",
        metavar="PATH",
        type=Path,
        help="folder of SparseProp as its setup.py builds it: sparseprop/ and the compiled backend; time it, too",
    )
    parser.add_argument("--picture", type=Path, help="write the ratios as a picture")
    parser.add_argument("--json", type=Path, help="write the rows as JSON")
    parser.add_argument("--verbose", action="store_true", help="let the sides print")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        work(options.side)
        return
    check_torch(parser, options)
    from sparsekit.engine import build

    if not build.available():
        raise SystemExit(f"the engine cannot be timed: {build.reason()}")
    roof = roofline()
    rows = measure(options)
    show(rows, roof)
    if options.json:
        plain = [row | {"layer": row["layer"].name} for row in rows]
        options.json.write_text(json.dumps({"roofline": asdict(roof), "rows": plain}, indent=1))
    if options.picture:
        draw(rows, options.picture)
        print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
