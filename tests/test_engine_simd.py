"""The engine's C++ headers that know nothing of TensorFlow, compiled for each instruction set that can be run here."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from sparsekit.engine import build

ENGINE = Path(build.__file__).parent
ARM_COMPILER, ARM_MACHINE = "aarch64-linux-gnu-g++", "qemu-aarch64"

# Small whole numbers, so that every sum is exact in whatever order it is taken.
PROGRAM = r"""
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <vector>

#include "bits.h"
#include "conv_kernels.h"

using namespace sparsekit;
using simd::kWidth;
using simd::Load;
using simd::Vector;

static void Check(bool right, const char* what) {
  if (right) return;
  printf("wrong: %s\n", what);
  exit(1);
}

static unsigned state = 1;
static float Small() {
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(static_cast<int>(state >> 24) % 9 - 4);
}

struct Lines {  // vectors in aligned memory
  float* data;
  size_t count;
  explicit Lines(size_t vectors) : count(vectors * kWidth) {
    data = static_cast<float*>(aligned_alloc(simd::kBytes, vectors * simd::kBytes));
    for (size_t i = 0; i < count; ++i) data[i] = Small();
  }
  Vec* vectors() { return reinterpret_cast<Vec*>(data); }
};

static void Moves() {
  Lines lines(kWidth);
  Vector rows[kWidth];
  for (int i = 0; i < kWidth; ++i) rows[i] = simd::LoadAligned(lines.data + i * kWidth);
  simd::Transpose(rows);
  for (int i = 0; i < kWidth; ++i) {
    for (int j = 0; j < kWidth; ++j) Check(rows[i][j] == lines.data[j * kWidth + i], "Transpose");
  }
  const Vector sums = simd::SumLanes(lines.data);
  for (int i = 0; i < kWidth; ++i) {
    float sum = 0;
    for (int j = 0; j < kWidth; ++j) sum += lines.data[i * kWidth + j];
    Check(sums[i] == sum, "SumLanes");
  }
  const float nan = std::numeric_limits<float>::quiet_NaN();
  Vector mixed{};
  mixed[0] = nan, mixed[1] = -2, mixed[2] = 3, mixed[3] = -0.0f;
  const Vector clipped = simd::Relu(mixed);
  Check(std::isnan(clipped[0]) && clipped[1] == 0 && clipped[2] == 3 && clipped[3] == 0, "Relu");
  Check(!std::signbit(static_cast<float>(clipped[3])), "Relu of -0");
}

static void Edges() {
  constexpr int kSize = kWidth + 1, kStride = kWidth + 3;
  std::vector<float> from(kSize * kStride), gate(kSize * kStride);
  for (float& value : from) value = Small();
  for (float& value : gate) value = Small();
  for (int height = 1; height <= kSize; ++height) {
    for (int width = 1; width <= kSize; ++width) {
      const int rows = height < kWidth ? height : kWidth, columns = width < kWidth ? width : kWidth;
      for (bool gated : {false, true}) {
        Lines packed(kWidth);
        if (gated) {
          simd::TransposeIn(simd::GatedRows{from.data(), gate.data(), kStride}, height, width, packed.data, kWidth);
        } else {
          simd::TransposeIn(simd::Rows{from.data(), kStride}, height, width, packed.data, kWidth);
        }
        const bool whole = height >= kWidth && width >= kWidth;
        for (int i = 0; i < kWidth; ++i) {
          for (int j = 0; j < kWidth; ++j) {
            const bool inside = whole || (i < rows && j < columns);
            const bool open = !gated || gate[i * kStride + j] > 0;
            const float want = inside && open ? from[i * kStride + j] : 0;
            Check(packed.data[j * kWidth + i] == want, gated ? "TransposeIn of gated rows" : "TransposeIn");
          }
        }
        std::vector<float> back(kSize * kStride, 99);
        simd::TransposeOut(packed.data, kWidth, back.data(), kStride, height, width);
        for (int i = 0; i < kSize; ++i) {
          for (int j = 0; j < kStride; ++j) {
            const bool inside = i < rows && j < columns;
            Check(back[i * kStride + j] == (inside ? packed.data[j * kWidth + i] : 99), "TransposeOut");
          }
        }
      }
    }
  }
}

// Lists of kept weights, some of them empty, of which each meets a vector of the operand.
struct Lists {
  std::vector<Entry> entries;
  std::vector<int32_t> starts{0};
  explicit Lists(int operands) {
    for (int list = 0; list < kWidth; ++list) {
      for (int i = 0; i < (list % 3 == 1 ? 0 : 5 * list); ++i) {
        state = state * 1664525u + 1013904223u;
        entries.push_back({static_cast<int32_t>((state >> 16) % operands) * simd::kBytes, Small()});
      }
      starts.push_back(static_cast<int32_t>(entries.size()));
    }
  }
};

template <int Rows>
static void Forward() {
  for (int cols = 1; cols <= kMaxStripCols; ++cols) {
    constexpr int kOperands = 40, kPitch = 64;
    Lists lists(kOperands);
    Lines operand(kOperands + kPitch + kMaxStripCols);
    for (bool first : {true, false}) {
      Lines sums(kWidth * Rows * cols);
      const std::vector<float> before(sums.data, sums.data + sums.count);
      ForwardKernelOf<Rows>(cols)(lists.entries.data(), lists.starts.data(), kWidth,
                                  reinterpret_cast<const char*>(operand.data), kPitch * simd::kBytes, first,
                                  sums.vectors(), Ahead());
      for (int list = 0; list < kWidth; ++list) {
        for (int pixel = 0; pixel < Rows * cols; ++pixel) {
          for (int lane = 0; lane < kWidth; ++lane) {
            const size_t at = (list * Rows * cols + pixel) * kWidth + lane;
            float want = first ? 0 : before[at];
            for (int e = lists.starts[list]; e < lists.starts[list + 1]; ++e) {
              const int vector = lists.entries[e].offset / simd::kBytes + pixel / cols * kPitch + pixel % cols;
              want += lists.entries[e].value * operand.data[vector * kWidth + lane];
            }
            Check(sums.data[at] == want, "ForwardStrip");
          }
        }
      }
    }
  }
}

template <bool InputGradient>
static void Backward() {
  for (int cols = 1; cols <= kMaxStripCols; ++cols) {
    constexpr int kOperands = 40;
    Lists lists(kOperands);
    Lines operand(kOperands + kMaxStripCols), input(kWidth * cols);
    const int64_t entries = static_cast<int64_t>(lists.entries.size());
    for (bool first : {true, false}) {
      Lines gradient(kWidth * cols), sums(entries / kWidth + 1);
      const std::vector<float> before(gradient.data, gradient.data + gradient.count);
      const std::vector<float> sums_before(sums.data, sums.data + sums.count);
      ValueSums value_sums(sums.data, 0);
      BackwardKernelOf<InputGradient>(cols)(lists.entries.data(), lists.starts.data(), kWidth,
                                            reinterpret_cast<const char*>(operand.data), input.vectors(), first,
                                            gradient.vectors(), &value_sums, Ahead(), Ahead());
      value_sums.FlushAll(entries);
      for (int list = 0; list < kWidth; ++list) {
        for (int pixel = 0; pixel < cols && InputGradient; ++pixel) {
          for (int lane = 0; lane < kWidth; ++lane) {
            const size_t at = (list * cols + pixel) * kWidth + lane;
            float want = first ? 0 : before[at];
            for (int e = lists.starts[list]; e < lists.starts[list + 1]; ++e) {
              const int vector = lists.entries[e].offset / simd::kBytes + pixel;
              want += lists.entries[e].value * operand.data[vector * kWidth + lane];
            }
            Check(gradient.data[at] == want, "input gradient of BackwardStrip");
          }
        }
        for (int e = lists.starts[list]; e < lists.starts[list + 1]; ++e) {
          float want = sums_before[e];
          for (int i = 0; i < cols * kWidth; ++i) {
            want += input.data[list * cols * kWidth + i] *
                    operand.data[lists.entries[e].offset / simd::kBytes * kWidth + i];
          }
          Check(sums.data[e] == want, "value gradient of BackwardStrip");
        }
      }
    }
  }
}

static void Bits() {
  for (int size = 0; size < 40; ++size) {
    std::vector<uint8_t> mask(size);
    std::vector<int64_t> set, unset, seen_set, seen_unset;
    for (int i = 0; i < size; ++i) {
      mask[i] = Small() > 1 ? (i % 2 ? 1 : 128) : 0;
      if (i > 0) (mask[i] ? set : unset).push_back(i);
    }
    if (size == 0) continue;
    ForEachSet(mask.data(), 1, size, [&](int64_t i) { seen_set.push_back(i); });
    Check(seen_set == set, "ForEachSet");
    ForEachUnset(mask.data(), 1, size, [&](int64_t i) { seen_unset.push_back(i); });
    Check(seen_unset == unset, "ForEachUnset");
    Check(CountSet(mask.data(), 1, size) == static_cast<int64_t>(set.size()), "CountSet");
  }
}

int main() {
  Moves();
  Edges();
  Forward<1>();
  Forward<2>();
  Backward<false>();
  Backward<true>();
  Bits();
  printf("%d lanes, all right\n", kWidth);
}
"""


def targets() -> dict[str, tuple[list[str], list[str]]]:
    """How to compile for an instruction set, and what to run the program with."""
    found: dict[str, tuple[list[str], list[str]]] = {"native": ([], [])}
    if (command := build.compiler()) is not None:
        native = [*command, *build._probe(command)[0]]
        found = {"native": (native, []), "portable": (list(command), [])}
        if platform.machine() == "x86_64":
            found["no AVX-512"] = [*native, "-mno-avx512f"], []
    if shutil.which(ARM_COMPILER) and shutil.which(ARM_MACHINE):
        found["NEON"] = [ARM_COMPILER, "-static"], [ARM_MACHINE]
    return found


TARGETS = targets()


def usable(command: list[str]) -> bool:
    """Whether there is a compiler; without one the engine says so."""
    if not command:
        assert "install a C++17 compiler" in (build.reason() or "")
    return bool(command)


@pytest.mark.parametrize("target", TARGETS)
def test_vectors_and_kernels_equal_scalar_loops(tmp_path, target):
    command, machine = TARGETS[target]
    if not usable(command):
        return
    source, program = tmp_path / "check.cc", tmp_path / "check"
    source.write_text(PROGRAM)
    subprocess.run([*command, *build._FLAGS, "-std=c++17", f"-I{ENGINE}", str(source), "-o", str(program)], check=True)
    done = subprocess.run([*machine, str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith(" lanes, all right\n")
    assert target != "NEON" or done.stdout.startswith("4 ")


@pytest.mark.parametrize(
    "macro", [("__BYTE_ORDER__", "__ORDER_BIG_ENDIAN__"), ("__SIZEOF_POINTER__", "4")], ids=["big-endian", "32 bits"]
)
def test_another_kind_of_cpu_is_refused_by_name(macro):
    command, _ = TARGETS["native"]
    if not usable(command):
        return
    name, value = macro
    flags = [f"-U{name}", f"-D{name}={value}", "-std=c++17", "-fsyntax-only", "-x", "c++"]
    done = subprocess.run([*command, *flags, str(ENGINE / "simd.h")], capture_output=True, text=True)
    assert done.returncode != 0
    assert "the engine needs a 64-bit little-endian CPU" in done.stderr


@pytest.mark.parametrize("machine", ["x86_64", "AMD64", "aarch64", "arm64", "ppc64le", "riscv64", ""])
def test_the_tuning_flags_of_a_machine(machine):
    tunings = build._tunings(machine)
    arm = machine in ("aarch64", "arm64")
    assert tunings[0] == (("-mcpu=native",) if arm else ("-march=native",))
    assert set(tunings) == {("-mcpu=native",), ("-march=native",), ()}
    assert tunings[-1] == (), "a compiler that knows no native CPU still builds"


def test_the_first_flags_that_the_compiler_takes_are_used(tmp_path, monkeypatch):
    picky = tmp_path / "picky"
    picky.write_text(
        '#!/bin/sh\ncase " $* " in *" -march=native "*) exit 1;; *" --version "*) echo picky 1;; *) echo "$@";; esac\n'
    )
    picky.chmod(0o755)
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    tuning, version, _ = build._probe((str(picky),))
    assert (tuning, version) == (("-mcpu=native",), "picky 1")
