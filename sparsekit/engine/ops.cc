// y = x W for a Dense kernel W (in, out) of which only the kept values exist, and both gradients.
//
// Kept positions lie in two orders. By rows (the order of the value vector): row_pointers (in + 1), columns (kept). By
// columns: column_pointers (out + 1), rows (kept), permutation (kept: where in the value vector). The batch is taken in
// tiles of some vector registers; a tile is transposed so that one kept weight multiplies one line of batch lanes.
//
// No sum depends on the number of threads: an output, an input gradient and a value gradient each belong to one task, and
// each adds in the order of the index arrays, then of the tiles.

#include <atomic>
#include <type_traits>

#include "parallel.h"
#include "simd.h"
#include "tensorflow.h"

namespace sparsekit {
namespace {

using simd::kMaxVectors;
using simd::kWidth;
using simd::Load;
using simd::LoadAligned;
using simd::Store;
using simd::StoreAligned;
using simd::Vector;

// How many kept weights a row or a column costs by itself (its transposes, loads and stores).
constexpr int64_t kSegmentOverhead = 4;

constexpr int32_t kAhead = 8;         // kept weights between a prefetch and its use
constexpr int64_t kLineFloats = 16;   // of a cache line
// From so many workers on, they transpose a tile together and wait for each other, instead of each for itself.
constexpr int64_t kShareFrom = 4;

int64_t RoundUp(int64_t size) { return (size + kWidth - 1) / kWidth * kWidth; }

// First column of part `part` of `of`, in whole blocks.
int64_t Block(int64_t columns, int64_t part, int64_t of) {
  return std::min(columns, RoundUp(columns) / kWidth * part / of * kWidth);
}

// The batch, cut into tiles of nearly equal width that fit the registers.
struct Tiles {
  int64_t batch, vectors, count;
  explicit Tiles(int64_t batch)
      : batch(batch), vectors((batch + kWidth - 1) / kWidth), count((vectors + kMaxVectors - 1) / kMaxVectors) {}
  int64_t First(int64_t tile) const { return vectors * tile / count; }
  int64_t Vectors(int64_t tile) const { return First(tile + 1) - First(tile); }
  int64_t Begin(int64_t tile) const { return First(tile) * kWidth; }
  int64_t Height(int64_t tile) const { return std::min(batch, First(tile + 1) * kWidth) - Begin(tile); }
};

template <int kVectors, typename Work>
void CallWithVectors(int64_t vectors, const Work& work) {
  if constexpr (kVectors > 1) {
    if (vectors < kVectors) return CallWithVectors<kVectors - 1>(vectors, work);
  }
  work(std::integral_constant<int, kVectors>());
}

// Columns [begin, end) of `source`, transposed: column c becomes a line of kVectors * kWidth batch lanes.
template <int kVectors, typename Source>
void TransposeTile(const Source& source, int64_t height, int64_t columns, int64_t begin, int64_t end, float* lines) {
  constexpr int64_t kLanes = kVectors * kWidth;
  for (int64_t column = begin; column < end; column += kWidth) {
    for (int64_t lane = 0; lane < kLanes; lane += kWidth) {
      simd::TransposeIn(source.At(lane, column), height - lane, columns - column, lines + column * kLanes + lane, kLanes);
    }
  }
}

struct ForwardTask {
  const float* values;
  const float* bias;
  const int32_t* pointers;
  const int32_t* rows;
  const int32_t* permutation;
  int64_t outputs;
  bool relu;

  template <int kVectors>
  SPARSEKIT_INLINE void Add(int32_t k, const float* lines, Vector* sum) const {
    const float value = values[permutation[k]];
    const float* line = lines + rows[k] * static_cast<int64_t>(kVectors * kWidth);
    for (int j = 0; j < kVectors; ++j) sum[j] += value * LoadAligned(line + j * kWidth);
  }

  template <int kVectors>
  void Run(const float* lines, int64_t begin, int64_t end, int64_t height, float* y) const {
    constexpr int64_t kLanes = kVectors * kWidth;
    // A sum waits four cycles for its last term: a narrow tile has several sums under way, joined at the end.
    constexpr int kChains = kVectors >= 3 ? 1 : 4 / kVectors;
    alignas(simd::kBytes) float block[kWidth * kLanes];
    for (int64_t first = begin; first < end; first += kWidth) {
      const int64_t width = std::min<int64_t>(kWidth, end - first);
      for (int64_t o = 0; o < width; ++o) {
        Vector sum[kChains][kVectors];
        for (int chain = 0; chain < kChains; ++chain) {
          const Vector start = simd::Broadcast(chain == 0 && bias != nullptr ? bias[first + o] : 0.0f);
          for (int j = 0; j < kVectors; ++j) sum[chain][j] = start;
        }
        const int32_t stop = pointers[first + o + 1];
        int32_t k = pointers[first + o];
        for (; k + kChains <= stop; k += kChains) {
#pragma GCC unroll 4
          for (int chain = 0; chain < kChains; ++chain) Add<kVectors>(k + chain, lines, sum[chain]);
        }
        for (; k < stop; ++k) Add<kVectors>(k, lines, sum[0]);
        for (int j = 0; j < kVectors; ++j) {
          Vector total = sum[0][j];
          for (int chain = 1; chain < kChains; ++chain) total += sum[chain][j];
          StoreAligned(block + o * kLanes + j * kWidth, relu ? simd::Relu(total) : total);
        }
      }
      for (int64_t lane = 0; lane < height; lane += kWidth) {
        simd::TransposeOut(block + lane, kLanes, y + lane * outputs + first, outputs, height - lane, width);
      }
    }
  }
};

class DenseOp : public OpKernel {
 public:
  explicit DenseOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("relu", &relu_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& x = context->input(0);
    const Tensor& values = context->input(1);
    const Tensor& pointers = context->input(4);
    const Tensor& rows = context->input(5);
    const Tensor& permutation = context->input(6);
    OP_REQUIRES(context, x.dims() == 2, InvalidArgument("x must be (batch, in), got shape ", x.shape().DebugString()));
    OP_REQUIRES(context, values.dims() == 1,
                InvalidArgument("values must be a vector, got shape ", values.shape().DebugString()));
    const int64_t kept = values.NumElements();
    OP_REQUIRES_OK(context, CheckPointers("column_pointers", pointers, kept));
    OP_REQUIRES_OK(context, CheckVector("rows", rows, kept));
    OP_REQUIRES_OK(context, CheckVector("permutation", permutation, kept));
    const int64_t batch = x.dim_size(0);
    const int64_t inputs = x.dim_size(1);
    const int64_t outputs = pointers.NumElements() - 1;
    OP_REQUIRES_OK(context, CheckVector("row_pointers", context->input(2), inputs + 1));
    const bool has_bias = context->num_inputs() > 7;
    if (has_bias) OP_REQUIRES_OK(context, CheckVector("bias", context->input(7), outputs));
    Tensor* y = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({batch, outputs}), &y));
    if (y->NumElements() == 0) return;

    const Tiles tiles(batch);
    const int64_t workers = Workers(context, (kept + kSegmentOverhead * (inputs + outputs)) * tiles.vectors * 1.5);
    // Tiles are spread over the workers; where there are too few, the columns of a tile are, too.
    const int64_t parts = tiles.count >= 8 * workers ? 1 : workers / Gcd(tiles.count, workers);
    const bool shared = parts >= kShareFrom;
    const int64_t tasks = shared ? parts : tiles.count * parts;
    const int64_t used = std::min(workers, tasks);
    const int64_t lines_size = RoundUp(inputs) * std::min<int64_t>(tiles.vectors, kMaxVectors) * kWidth;
    Tensor scratch;
    OP_REQUIRES_OK(context, context->allocate_temp(DT_FLOAT, TensorShape({shared ? 1 : used, lines_size}),
                                                   &scratch));
    const ForwardTask task{Floats(values),     has_bias ? Floats(context->input(7)) : nullptr,
                           Ints(pointers),     Ints(rows),
                           Ints(permutation),  outputs,
                           relu_};
    std::atomic<bool> bad{false};
    const auto transpose = [&](int64_t tile, int64_t part, int64_t of, float* lines) {
      const simd::Rows source{Floats(x) + tiles.Begin(tile) * inputs, inputs};
      CallWithVectors<kMaxVectors>(tiles.Vectors(tile), [&](auto vectors) {
        TransposeTile<vectors()>(source, tiles.Height(tile), inputs, Block(inputs, part, of), Block(inputs, part + 1, of),
                                 lines);
      });
    };
    const auto multiply = [&](int64_t tile, int64_t part, const float* lines) {
      const int64_t begin = Boundary(task.pointers, outputs, part, parts, kWidth, kSegmentOverhead);
      const int64_t end = Boundary(task.pointers, outputs, part + 1, parts, kWidth, kSegmentOverhead);
      const int32_t first = task.pointers[begin];
      const int32_t count = task.pointers[end] - first;
      if (!AllBelow(task.rows + first, count, inputs) || !AllBelow(task.permutation + first, count, kept)) {
        bad = true;
        return;
      }
      CallWithVectors<kMaxVectors>(tiles.Vectors(tile), [&](auto vectors) {
        task.template Run<vectors()>(lines, begin, end, tiles.Height(tile), Floats(y) + tiles.Begin(tile) * outputs);
      });
    };
    if (shared) {
      float* lines = Floats(&scratch);
      for (int64_t tile = 0; tile < tiles.count; ++tile) {
        Parallel(context, workers, [&](int64_t worker) { transpose(tile, worker, workers, lines); });
        Parallel(context, parts, [&](int64_t part) { multiply(tile, part, lines); });
      }
    } else {
      Parallel(context, used, [&](int64_t worker) {
        float* lines = Floats(&scratch) + worker * lines_size;
        for (int64_t index = worker; index < tasks; index += used) {
          transpose(index / parts, 0, 1, lines);
          multiply(index / parts, index % parts, lines);
        }
      });
    }
    OP_REQUIRES(context, !bad, InvalidArgument("rows must lie below ", inputs, " and permutation below ", kept));
  }

 private:
  static int64_t Gcd(int64_t a, int64_t b) { return b == 0 ? a : Gcd(b, a % b); }

  bool relu_;
};

struct BackwardTask {
  const float* values;
  const int32_t* pointers;
  const int32_t* columns;
  int64_t inputs;
  float* value_gradient;
  float* input_gradient;  // of the tile; null where nobody asked for it

  // Rows [begin, end): each line of the output gradient is loaded once, for the input gradient (a sum in registers) and
  // for the value gradient (a product with the row's own lanes, summed over lanes kWidth values at a time).
  template <int kVectors, bool kWantInput>
  void Run(const float* lines, const simd::Rows& x, int64_t begin, int64_t end, int64_t height, bool add) const {
    constexpr int64_t kLanes = kVectors * kWidth;
    alignas(simd::kBytes) float block[kWidth * kLanes];
    alignas(simd::kBytes) float partial[kWidth * kWidth] = {};
    int filled = 0;
    int32_t done = pointers[begin];
    const int32_t last = pointers[end] - 1;
    for (int64_t first = begin; first < end; first += kWidth) {
      const int64_t width = std::min<int64_t>(kWidth, end - first);
      TransposeTile<kVectors>(x.At(0, first), height, width, 0, kWidth, block);
      for (int64_t i = 0; i < width; ++i) {
        Vector own[kVectors];
        Vector sum[kVectors];
        for (int j = 0; j < kVectors; ++j) {
          own[j] = LoadAligned(block + i * kLanes + j * kWidth);
          sum[j] = Vector{};
        }
        int32_t k = pointers[first + i];
        const int32_t stop = pointers[first + i + 1];
        while (k < stop) {
          const int32_t until = std::min(stop, k + kWidth - filled);
          for (; k < until; ++k, ++filled) {
            // Lines come from the second-level cache in no order that the hardware could foresee.
            const float* next = lines + columns[std::min(k + kAhead, last)] * kLanes;
            for (int64_t lane = 0; lane < kLanes; lane += kLineFloats) __builtin_prefetch(next + lane);
            const float value = values[k];
            const float* line = lines + columns[k] * kLanes;
            Vector product{};
            for (int j = 0; j < kVectors; ++j) {
              const Vector gradient = LoadAligned(line + j * kWidth);
              if (kWantInput) sum[j] += value * gradient;
              product = j == 0 ? own[0] * gradient : product + own[j] * gradient;
            }
            StoreAligned(partial + filled * kWidth, product);
          }
          if (filled == kWidth) {
            const Vector total = simd::SumLanes(partial);
            Store(value_gradient + done, add ? Load(value_gradient + done) + total : total);
            done += kWidth;
            filled = 0;
          }
        }
        if (kWantInput) {
          for (int j = 0; j < kVectors; ++j) StoreAligned(block + i * kLanes + j * kWidth, sum[j]);
        }
      }
      if (kWantInput) {
        for (int64_t lane = 0; lane < height; lane += kWidth) {
          simd::TransposeOut(block + lane, kLanes, input_gradient + lane * inputs + first, inputs, height - lane, width);
        }
      }
    }
    const Vector total = simd::SumLanes(partial);
    for (int i = 0; i < filled; ++i) value_gradient[done + i] = add ? value_gradient[done + i] + total[i] : total[i];
  }
};

// Sums of lines over their lanes, for the bias.
template <int kVectors>
void SumLines(const float* lines, int64_t begin, int64_t end, bool add, float* sums) {
  constexpr int64_t kLanes = kVectors * kWidth;
  alignas(simd::kBytes) float partial[kWidth * kWidth] = {};
  for (int64_t first = begin; first < end; first += kWidth) {
    const int64_t width = std::min<int64_t>(kWidth, end - first);
    for (int64_t o = 0; o < width; ++o) {
      Vector sum = LoadAligned(lines + (first + o) * kLanes);
      for (int j = 1; j < kVectors; ++j) sum += LoadAligned(lines + (first + o) * kLanes + j * kWidth);
      StoreAligned(partial + o * kWidth, sum);
    }
    const Vector total = simd::SumLanes(partial);
    for (int64_t o = 0; o < width; ++o) sums[first + o] = add ? sums[first + o] + total[o] : total[o];
  }
}

class DenseGradOp : public OpKernel {
 public:
  explicit DenseGradOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("input_gradient", &want_input_));
    OP_REQUIRES_OK(context, context->GetAttr("bias_gradient", &want_bias_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& dy = context->input(0);
    const Tensor& x = context->input(1);
    const Tensor& values = context->input(2);
    const Tensor& pointers = context->input(3);
    const Tensor& columns = context->input(4);
    OP_REQUIRES(context, x.dims() == 2, InvalidArgument("x must be (batch, in), got shape ", x.shape().DebugString()));
    OP_REQUIRES(context, dy.dims() == 2 && dy.dim_size(0) == x.dim_size(0),
                InvalidArgument("dy must be (batch, out) with the batch of x ", x.shape().DebugString(), ", got shape ",
                                dy.shape().DebugString()));
    OP_REQUIRES(context, values.dims() == 1,
                InvalidArgument("values must be a vector, got shape ", values.shape().DebugString()));
    const int64_t kept = values.NumElements();
    const int64_t batch = x.dim_size(0);
    const int64_t inputs = x.dim_size(1);
    const int64_t outputs = dy.dim_size(1);
    OP_REQUIRES_OK(context, CheckPointers("row_pointers", pointers, kept));
    OP_REQUIRES_OK(context, CheckVector("row_pointers", pointers, inputs + 1));
    OP_REQUIRES_OK(context, CheckVector("columns", columns, kept));
    const bool gated = context->num_inputs() > 5;
    if (gated) {
      OP_REQUIRES(context, context->input(5).shape() == dy.shape(),
                  InvalidArgument("y must have the shape of dy ", dy.shape().DebugString(), ", got shape ",
                                  context->input(5).shape().DebugString()));
    }
    Tensor* input_gradient = nullptr;
    Tensor* value_gradient = nullptr;
    Tensor* bias_gradient = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, want_input_ ? x.shape() : TensorShape({0, 0}), &input_gradient));
    OP_REQUIRES_OK(context, context->allocate_output(1, values.shape(), &value_gradient));
    OP_REQUIRES_OK(context,
                   context->allocate_output(2, TensorShape({want_bias_ ? outputs : 0}), &bias_gradient));
    if (batch == 0) {
      std::fill_n(Floats(value_gradient), kept, 0.0f);
      std::fill_n(Floats(bias_gradient), bias_gradient->NumElements(), 0.0f);
      return;
    }

    const Tiles tiles(batch);
    const int64_t workers = Workers(context, (kept + kSegmentOverhead * (inputs + outputs)) * tiles.vectors * 3.0);
    const bool shared = workers >= kShareFrom;
    const int64_t lines_size = RoundUp(outputs) * std::min<int64_t>(tiles.vectors, kMaxVectors) * kWidth;
    Tensor scratch;
    OP_REQUIRES_OK(context, context->allocate_temp(DT_FLOAT,
                                                   TensorShape({shared ? 1 : workers, lines_size}), &scratch));
    std::atomic<bool> bad{false};
    const auto transpose = [&](int64_t tile, int64_t part, int64_t of, float* lines) {
      const int64_t offset = tiles.Begin(tile) * outputs;
      const int64_t begin = Block(outputs, part, of);
      const int64_t end = Block(outputs, part + 1, of);
      CallWithVectors<kMaxVectors>(tiles.Vectors(tile), [&](auto vectors) {
        if (gated) {
          const simd::GatedRows source{Floats(dy) + offset, Floats(context->input(5)) + offset, outputs};
          TransposeTile<vectors()>(source, tiles.Height(tile), outputs, begin, end, lines);
        } else {
          const simd::Rows source{Floats(dy) + offset, outputs};
          TransposeTile<vectors()>(source, tiles.Height(tile), outputs, begin, end, lines);
        }
      });
    };
    const auto multiply = [&](int64_t tile, int64_t part, const float* lines) {
      const int64_t begin = Boundary(Ints(pointers), inputs, part, workers, kWidth, kSegmentOverhead);
      const int64_t end = Boundary(Ints(pointers), inputs, part + 1, workers, kWidth, kSegmentOverhead);
      const int32_t first = Ints(pointers)[begin];
      if (!AllBelow(Ints(columns) + first, Ints(pointers)[end] - first, outputs)) {
        bad = true;
        return;
      }
      const BackwardTask task{Floats(values),
                              Ints(pointers),
                              Ints(columns),
                              inputs,
                              Floats(value_gradient),
                              want_input_ ? Floats(input_gradient) + tiles.Begin(tile) * inputs : nullptr};
      const simd::Rows own{Floats(x) + tiles.Begin(tile) * inputs, inputs};
      CallWithVectors<kMaxVectors>(tiles.Vectors(tile), [&](auto vectors) {
        if (want_bias_) {
          SumLines<vectors()>(lines, Block(outputs, part, workers), Block(outputs, part + 1, workers), tile > 0,
                              Floats(bias_gradient));
        }
        if (want_input_) {
          task.template Run<vectors(), true>(lines, own, begin, end, tiles.Height(tile), tile > 0);
        } else {
          task.template Run<vectors(), false>(lines, own, begin, end, tiles.Height(tile), tile > 0);
        }
      });
    };
    if (shared) {
      float* lines = Floats(&scratch);
      for (int64_t tile = 0; tile < tiles.count; ++tile) {
        Parallel(context, workers, [&](int64_t worker) { transpose(tile, worker, workers, lines); });
        Parallel(context, workers, [&](int64_t worker) { multiply(tile, worker, lines); });
      }
    } else {
      Parallel(context, workers, [&](int64_t worker) {
        float* lines = Floats(&scratch) + worker * lines_size;
        for (int64_t tile = 0; tile < tiles.count; ++tile) {
          transpose(tile, 0, 1, lines);
          multiply(tile, worker, lines);
        }
      });
    }
    OP_REQUIRES(context, !bad, InvalidArgument("columns must lie below ", outputs));
  }

 private:
  bool want_input_;
  bool want_bias_;
};

REGISTER_OP("SparsekitDense")
    .Input("x: float")
    .Input("values: float")
    .Input("row_pointers: int32")
    .Input("columns: int32")
    .Input("column_pointers: int32")
    .Input("rows: int32")
    .Input("permutation: int32")
    .Input("bias: biases * float")
    .Attr("biases: int >= 0")
    .Attr("relu: bool = false")
    .Output("y: float")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle x;
      ShapeHandle pointers;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &x));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(4), 1, &pointers));
      tensorflow::shape_inference::DimensionHandle outputs;
      TF_RETURN_IF_ERROR(c->Subtract(c->Dim(pointers, 0), 1, &outputs));
      c->set_output(0, c->Matrix(c->Dim(x, 0), outputs));
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("SparsekitDense").Device(DEVICE_CPU), DenseOp);

REGISTER_OP("SparsekitDenseGrad")
    .Input("dy: float")
    .Input("x: float")
    .Input("values: float")
    .Input("row_pointers: int32")
    .Input("columns: int32")
    .Input("y: gates * float")
    .Attr("gates: int >= 0")
    .Attr("input_gradient: bool = true")
    .Attr("bias_gradient: bool = false")
    .Output("dx: float")
    .Output("dvalues: float")
    .Output("dbias: float")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle dy;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &dy));
      bool input_gradient = true;
      bool bias_gradient = false;
      TF_RETURN_IF_ERROR(c->GetAttr("input_gradient", &input_gradient));
      TF_RETURN_IF_ERROR(c->GetAttr("bias_gradient", &bias_gradient));
      c->set_output(0, input_gradient ? c->input(1) : c->Matrix(0, 0));
      c->set_output(1, c->input(2));
      c->set_output(2, c->Vector(bias_gradient ? c->Dim(dy, 1) : c->MakeDim(0)));
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("SparsekitDenseGrad").Device(DEVICE_CPU), DenseGradOp);

}  // namespace
}  // namespace sparsekit
