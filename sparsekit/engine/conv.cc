// TensorFlow CPU ops: 2-D convolution, NHWC, with a kernel whose kept values are one vector.
//
// The structure comes as three constant vectors for each direction, all int32:
//   starts   [lists + 1]  first entry of each list, in ascending order; the last element is the number of entries
//   taps     [entries]    channel * (kernel rows * kernel cols) + tap of the entry's operand
//   values   [entries]    the entry's place in the vector of values
// Forward: a list is one output channel, the operand an input channel; lists come in blocks, [block][output channel].
// Backward: a list is one input channel, the operand an output channel; lists are [phase][block][input channel].
// Entries of a block name a few operand channels only, so that their part of a tile stays in the first-level cache.

#include <atomic>

#include "conv_kernels.h"
#include "conv_plan.h"
#include "tensorflow.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/util/work_sharder.h"

namespace sparsekit {
namespace {

using tensorflow::DT_INT8;

constexpr int64_t kMaxChunks = 32;              // independent partial sums of a gradient
constexpr int64_t kMaxPartialFloats = 1 << 22;  // and what they may take together
constexpr int64_t kMaxStrip = kMaxStripCols * kForwardStripRows;
constexpr int64_t kSerialEntries = 1 << 15;

struct Attributes {
  std::vector<int32_t> kernel, strides, dilations, pads;
  std::string padding;

  absl::Status Read(OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(context->GetAttr("kernel", &kernel));
    TF_RETURN_IF_ERROR(context->GetAttr("strides", &strides));
    TF_RETURN_IF_ERROR(context->GetAttr("dilations", &dilations));
    TF_RETURN_IF_ERROR(context->GetAttr("padding", &padding));
    TF_RETURN_IF_ERROR(context->GetAttr("pads", &pads));
    return Check();
  }

  absl::Status Check() const {
    for (const auto* pair : {&kernel, &strides, &dilations}) {
      if (pair->size() != 2 || (*pair)[0] < 1 || (*pair)[1] < 1) {
        return InvalidArgument("kernel, strides and dilations must be two positive numbers each");
      }
    }
    if (padding != "EXPLICIT") return absl::OkStatus();
    if (pads.size() != 4) return InvalidArgument("pads must be four numbers: top, bottom, left, right");
    for (int side = 0; side < 4; ++side) {
      const int64_t reach = static_cast<int64_t>(kernel[side / 2] - 1) * dilations[side / 2];
      if (pads[side] < 0 || pads[side] > reach) {
        return InvalidArgument("pads must lie between 0 and the dilated kernel's extent less one");
      }
    }
    return absl::OkStatus();
  }

  absl::Status Resolve(int64_t in, int dimension, Axis* axis) const {
    axis->in = in;
    axis->kernel = kernel[dimension];
    axis->stride = strides[dimension];
    axis->dilation = dilations[dimension];
    const int64_t extent = (axis->kernel - 1) * axis->dilation + 1;
    if (padding == "SAME") {
      axis->out = CeilDiv(in, axis->stride);
      axis->pad = std::max<int64_t>((axis->out - 1) * axis->stride + extent - in, 0) / 2;
    } else {
      axis->pad = padding == "EXPLICIT" ? pads[2 * dimension] : 0;
      const int64_t padded = in + axis->pad + (padding == "EXPLICIT" ? pads[2 * dimension + 1] : 0);
      if (padded < extent - axis->stride) {
        return InvalidArgument("the kernel covers ", extent, " pixels but the padded input has only ", padded);
      }
      axis->out = (padded - extent + axis->stride) / axis->stride;
    }
    axis->Resolve();
    return absl::OkStatus();
  }
};

// The index vectors of one direction.
struct Index {
  const int32_t* starts;
  const int32_t* taps;
  const int32_t* values;
  int64_t lists, entries;

  absl::Status Read(OpKernelContext* context, int first_input) {
    const Tensor& s = context->input(first_input);
    const Tensor& t = context->input(first_input + 1);
    const Tensor& v = context->input(first_input + 2);
    if (s.dims() != 1 || t.dims() != 1 || v.dims() != 1 || s.NumElements() < 2 ||
        t.NumElements() != v.NumElements()) {
      return InvalidArgument("the index must be three vectors, taps and values of one length, got shapes ",
                             s.shape().DebugString(), ", ", t.shape().DebugString(), ", ", v.shape().DebugString());
    }
    starts = s.flat<int32_t>().data();
    taps = t.flat<int32_t>().data();
    values = v.flat<int32_t>().data();
    lists = s.NumElements() - 1;
    entries = t.NumElements();
    bool ascending = starts[0] == 0 && starts[lists] == entries;
    for (int64_t i = 0; i < lists; ++i) ascending &= starts[i] <= starts[i + 1];
    if (!ascending) return InvalidArgument("starts must ascend from 0 to the number of entries, ", entries);
    return absl::OkStatus();
  }
};

struct Workers {
  explicit Workers(OpKernelContext* context)
      : threads(*context->device()->tensorflow_cpu_worker_threads()) {}

  // Calls work(slot, job) once for each job; calls that run at the same time have different slots.
  template <typename Work>
  void ForEach(int64_t jobs, const Work& work) const {
    std::atomic<int64_t> next{0};
    tensorflow::Shard(threads.num_threads, threads.workers, Slots(jobs), int64_t{1} << 30,
                      [&](int64_t begin, int64_t end) {
                        for (int64_t slot = begin; slot < end; ++slot) {
                          for (int64_t job = next++; job < jobs; job = next++) work(slot, job);
                        }
                      });
  }

  int64_t Slots(int64_t jobs) const { return std::min<int64_t>(jobs, threads.num_threads); }

  const tensorflow::DeviceBase::CpuWorkerThreads& threads;
};

// Joins the index with the values of this step: what the kernels read is one stream.
absl::Status JoinEntries(const Workers& workers, const Index& index, const std::vector<int32_t>& offsets,
                         const float* values, int64_t count, Entry* entries) {
  std::atomic<bool> good{true};
  const int64_t jobs = CeilDiv(index.entries, kSerialEntries);
  workers.ForEach(jobs, [&](int64_t, int64_t job) {
    bool inside = true;
    const int64_t end = std::min(index.entries, (job + 1) * kSerialEntries);
    for (int64_t e = job * kSerialEntries; e < end; ++e) {
      const uint32_t tap = index.taps[e], at = index.values[e];
      if (tap < offsets.size() && at < static_cast<uint64_t>(count)) {
        entries[e] = {offsets[tap], values[at]};
      } else {
        inside = false;
        entries[e] = {0, 0.0f};
      }
    }
    if (!inside) good = false;
  });
  if (good) return absl::OkStatus();
  return InvalidArgument("an entry of the index lies outside of the kernel or of the ", count, " values");
}

absl::Status CheckTile(const Plan& plan, int64_t channels) {
  if (plan.channel_stride * channels > std::numeric_limits<int32_t>::max() / kVectorBytes) {
    return InvalidArgument("the kernel is too large for the sparse convolution");
  }
  return absl::OkStatus();
}

absl::Status Allocate(OpKernelContext* context, int64_t bytes, Tensor* tensor, char** data) {
  TF_RETURN_IF_ERROR(context->allocate_temp(DT_INT8, TensorShape({bytes + 64}), tensor));
  *data = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(tensor->data()) + 63) / 64 * 64);
  return absl::OkStatus();
}

// A 1x1 convolution with stride 1 has no rows: all pixels of the batch are one line.
bool Flatten(int64_t* batch, Axis* rows, Axis* cols) {
  if (rows->kernel != 1 || cols->kernel != 1 || rows->stride != 1 || cols->stride != 1) return false;
  cols->in = cols->out = *batch * rows->in * cols->in;
  rows->in = rows->out = 1;
  *batch = 1;
  return true;
}

class ConvOp : public OpKernel {
 public:
  explicit ConvOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
    OP_REQUIRES_OK(context, context->GetAttr("filters", &filters_));
    OP_REQUIRES_OK(context, context->GetAttr("relu", &relu_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& x = context->input(0);
    const Tensor& values = context->input(1);
    const Tensor& bias = context->input(2);
    OP_REQUIRES(context, x.dims() == 4 && x.dim_size(3) > 0,
                InvalidArgument("x must be [batch, rows, cols, channels], got ", x.shape().DebugString()));
    OP_REQUIRES(context, values.dims() == 1,
                InvalidArgument("values must be a vector, got ", values.shape().DebugString()));
    OP_REQUIRES(context, bias.dims() == 1 && (bias.NumElements() == 0 || bias.NumElements() == filters_),
                InvalidArgument("bias must hold ", filters_, " or 0 numbers, got ", bias.shape().DebugString()));
    Index index;
    OP_REQUIRES_OK(context, index.Read(context, 3));
    OP_REQUIRES(context, index.lists % filters_ == 0,
                InvalidArgument("starts must hold blocks of ", filters_, " lists, got ", index.lists));
    Axis rows, cols;
    OP_REQUIRES_OK(context, attributes_.Resolve(x.dim_size(1), 0, &rows));
    OP_REQUIRES_OK(context, attributes_.Resolve(x.dim_size(2), 1, &cols));
    int64_t batch = x.dim_size(0);
    const int64_t channels = x.dim_size(3);
    Tensor* y = nullptr;
    OP_REQUIRES_OK(context,
                   context->allocate_output(0, TensorShape({batch, rows.out, cols.out, filters_}), &y));
    if (y->NumElements() == 0) return;
    const bool flat = Flatten(&batch, &rows, &cols);

    Load load{batch, rows.out, cols.out, rows.reach, cols.reach};
    load.phases = 1;
    load.tile_channels = channels * rows.phases.size() * cols.phases.size();
    load.strip_channels = filters_;
    load.entries = index.entries;
    load.max_strip_rows = flat ? 1 : kForwardStripRows;
    load.max_strip_cols = kMaxStripCols;
    load.per_vector = 0.55;
    load.per_entry = 2.0;
    load.per_row = 20.0;
    const Plan plan = ChoosePlan(load);
    OP_REQUIRES_OK(context, CheckTile(plan, load.tile_channels));

    const int64_t taps = rows.kernel * cols.kernel;
    std::vector<int32_t> offsets(channels * taps);
    for (int64_t channel = 0, at = 0; channel < channels; ++channel) {
      for (int64_t ky = 0; ky < rows.kernel; ++ky) {
        for (int64_t kx = 0; kx < cols.kernel; ++kx, ++at) {
          const int64_t phase = rows.slot_of_tap[ky] * cols.phases.size() + cols.slot_of_tap[kx];
          offsets[at] = kVectorBytes * ((phase * channels + channel) * plan.channel_stride +
                                        rows.shift_of_tap[ky] * plan.packed_cols + cols.shift_of_tap[kx]);
        }
      }
    }
    const Workers workers(context);
    Tensor entry_memory;
    char* entry_data;
    OP_REQUIRES_OK(context, Allocate(context, index.entries * sizeof(Entry), &entry_memory, &entry_data));
    Entry* entries = reinterpret_cast<Entry*>(entry_data);
    OP_REQUIRES_OK(context, JoinEntries(workers, index, offsets, values.flat<float>().data(), values.NumElements(),
                                        entries));

    const int64_t strip = plan.strip_rows * plan.strip_cols;
    const int64_t tile_vectors = plan.channel_stride * load.tile_channels;
    // With one block the results of a few lists leave at once; with more they wait for the other blocks.
    const int64_t kept = index.lists == filters_ ? 0 : 1;
    const int64_t sum_vectors = strip * (kept ? filters_ : kLanes);
    const int64_t slot_vectors = tile_vectors + sum_vectors + CeilDiv(channels, kLanes);
    Tensor slot_memory;
    char* slot_data;
    OP_REQUIRES_OK(context, Allocate(context, workers.Slots(plan.groups) * slot_vectors * kVectorBytes,
                                     &slot_memory, &slot_data));
    const Image image{x.flat<float>().data(), nullptr, rows.in, cols.in, channels};
    const float* add = bias.NumElements() == 0 ? nullptr : bias.flat<float>().data();
    float* out = y->flat<float>().data();
    const ForwardKernel kernel =
        plan.strip_rows == 2 ? ForwardKernelOf<2>(plan.strip_cols) : ForwardKernelOf<1>(plan.strip_cols);
    const int64_t pitch = kVectorBytes * plan.packed_cols;
    workers.ForEach(plan.groups, [&](int64_t slot, int64_t group) {
      Vec* tile = reinterpret_cast<Vec*>(slot_data) + slot * slot_vectors;
      Vec* sums = tile + tile_vectors;
      float* zeros = reinterpret_cast<float*>(sums + sum_vectors);
      std::fill(zeros, zeros + channels, 0.0f);
      const Lanes lanes = plan.LanesOf(group);
      Vec* part = tile;
      for (const int64_t row_phase : rows.phases) {
        for (const int64_t col_phase : cols.phases) {
          const Walk walk{rows.stride, row_phase - rows.pad, cols.stride, col_phase - cols.pad};
          Pack(image, lanes, walk, {0, 0, plan.tile_rows + rows.reach, plan.packed_cols}, zeros, part,
               plan.channel_stride, plan.packed_cols);
          part += channels * plan.channel_stride;
        }
      }
      for (int64_t row = 0; row < plan.tile_rows; row += plan.strip_rows) {
        for (int64_t col = 0; col < plan.tile_cols; col += plan.strip_cols) {
          const char* operand = reinterpret_cast<const char*>(tile + row * plan.packed_cols + col);
          int64_t at[kMaxStrip * kLanes];
          Locate(lanes, {1, 0, 1, 0}, {row, col, plan.strip_rows, plan.strip_cols}, rows.out, cols.out, filters_, at);
          for (int64_t list = 0; list < index.lists; list += filters_) {
            const bool last = list + filters_ == index.lists;
            for (int64_t filter = 0; filter < filters_; filter += kLanes) {
              const int count = static_cast<int>(std::min<int64_t>(kLanes, filters_ - filter));
              Vec* part_sums = sums + filter * strip * kept;
              const Ahead results{last ? out + filter : nullptr, at};
              kernel(entries, index.starts + list + filter, count, operand, pitch, list == 0, part_sums, results);
              if (!last) continue;
              for (int64_t i = 0; i < strip; ++i) {
                UnpackPixel(part_sums + i, strip, at + i * kLanes, filter, count, add, relu_, out);
              }
            }
          }
        }
      }
    });
  }

 private:
  Attributes attributes_;
  int64_t filters_;
  bool relu_;
};

class ConvGradOp : public OpKernel {
 public:
  explicit ConvGradOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
    OP_REQUIRES_OK(context, context->GetAttr("relu", &relu_));
    OP_REQUIRES_OK(context, context->GetAttr("input_gradient", &input_gradient_));
    OP_REQUIRES_OK(context, context->GetAttr("bias_gradient", &bias_gradient_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& x = context->input(0);
    const Tensor& values = context->input(1);
    const Tensor& y = context->input(2);
    const Tensor& dy = context->input(3);
    OP_REQUIRES(context, x.dims() == 4 && x.dim_size(3) > 0,
                InvalidArgument("x must be [batch, rows, cols, channels], got ", x.shape().DebugString()));
    OP_REQUIRES(context, values.dims() == 1,
                InvalidArgument("values must be a vector, got ", values.shape().DebugString()));
    Index index;
    OP_REQUIRES_OK(context, index.Read(context, 4));
    Axis rows, cols;
    OP_REQUIRES_OK(context, attributes_.Resolve(x.dim_size(1), 0, &rows));
    OP_REQUIRES_OK(context, attributes_.Resolve(x.dim_size(2), 1, &cols));
    int64_t batch = x.dim_size(0);
    const int64_t channels = x.dim_size(3);
    OP_REQUIRES(context,
                dy.dims() == 4 && dy.dim_size(0) == batch && dy.dim_size(1) == rows.out &&
                    dy.dim_size(2) == cols.out && dy.dim_size(3) > 0,
                InvalidArgument("the output gradient must be [", batch, ", ", rows.out, ", ", cols.out,
                                ", filters], got ", dy.shape().DebugString()));
    const int64_t filters = dy.dim_size(3);
    OP_REQUIRES(context, !relu_ || y.shape() == dy.shape(),
                InvalidArgument("y and its gradient must have one shape, got ", y.shape().DebugString(), " and ",
                                dy.shape().DebugString()));
    const int64_t phases = rows.phases.size() * cols.phases.size();
    OP_REQUIRES(context, index.lists % (phases * channels) == 0,
                InvalidArgument("starts must hold ", phases, " x blocks x ", channels, " lists, got ", index.lists));
    const int64_t phase_lists = index.lists / phases;

    Tensor *dx = nullptr, *dvalues = nullptr, *dbias = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(
                                0, input_gradient_ ? x.shape() : TensorShape({0, 0, 0, channels}), &dx));
    OP_REQUIRES_OK(context, context->allocate_output(1, values.shape(), &dvalues));
    OP_REQUIRES_OK(context, context->allocate_output(2, TensorShape({bias_gradient_ ? filters : 0}), &dbias));
    float* dx_data = dx->flat<float>().data();
    float* dvalues_data = dvalues->flat<float>().data();
    float* dbias_data = dbias->flat<float>().data();
    std::fill(dvalues_data, dvalues_data + dvalues->NumElements(), 0.0f);
    std::fill(dbias_data, dbias_data + dbias->NumElements(), 0.0f);
    if (dy.NumElements() == 0 || phases < rows.stride * cols.stride) {
      std::fill(dx_data, dx_data + dx->NumElements(), 0.0f);
    }
    if (dy.NumElements() == 0) return;
    Flatten(&batch, &rows, &cols);

    Load load{batch, rows.BackwardSpan(), cols.BackwardSpan(), rows.reach, cols.reach};
    load.phases = phases;
    load.tile_channels = filters;
    load.strip_channels = channels;
    load.entries = index.entries;
    load.max_strip_rows = 1;
    load.max_strip_cols = kBackwardStripCols;
    load.per_vector = 1.05;
    load.per_entry = 4.0;
    load.per_row = 20.0;
    const Plan plan = ChoosePlan(load);
    OP_REQUIRES_OK(context, CheckTile(plan, filters));

    const int64_t taps = rows.kernel * cols.kernel;
    std::vector<int32_t> offsets(filters * taps);
    for (int64_t filter = 0, at = 0; filter < filters; ++filter) {
      for (int64_t ky = 0; ky < rows.kernel; ++ky) {
        for (int64_t kx = 0; kx < cols.kernel; ++kx, ++at) {
          offsets[at] = kVectorBytes * (filter * plan.channel_stride +
                                        (rows.reach - rows.shift_of_tap[ky]) * plan.packed_cols + cols.reach -
                                        cols.shift_of_tap[kx]);
        }
      }
    }
    const Workers workers(context);
    Tensor entry_memory;
    char* entry_data;
    OP_REQUIRES_OK(context, Allocate(context, index.entries * sizeof(Entry), &entry_memory, &entry_data));
    Entry* entries = reinterpret_cast<Entry*>(entry_data);
    OP_REQUIRES_OK(context, JoinEntries(workers, index, offsets, values.flat<float>().data(), values.NumElements(),
                                        entries));

    // Groups are summed up in chunks and the chunks in order, however many threads there are.
    const int64_t sum_floats = CeilDiv(index.entries, kLanes) * kLanes;
    const int64_t chunk_floats = sum_floats + filters * kLanes;
    const int64_t chunks =
        std::min({plan.groups, kMaxChunks, std::max<int64_t>(kMaxPartialFloats / chunk_floats, 2)});
    const int64_t tile_vectors = plan.channel_stride * filters;
    const int64_t kept = phase_lists == channels ? 0 : 1;
    const int64_t strip_vectors = plan.strip_cols * (kept ? channels : kLanes);
    const int64_t slot_vectors = tile_vectors + 2 * strip_vectors + CeilDiv(std::max(channels, filters), kLanes);
    Tensor chunk_memory, slot_memory;
    char *chunk_data, *slot_data;
    OP_REQUIRES_OK(context,
                   Allocate(context, chunks * chunk_floats * sizeof(float), &chunk_memory, &chunk_data));
    OP_REQUIRES_OK(context, Allocate(context, workers.Slots(chunks) * slot_vectors * kVectorBytes, &slot_memory,
                                     &slot_data));
    const Image input{x.flat<float>().data(), nullptr, rows.in, cols.in, channels};
    const Image gradient{dy.flat<float>().data(), relu_ ? y.flat<float>().data() : nullptr, rows.out, cols.out,
                         filters};
    const Walk gradient_walk{1, rows.base - rows.reach, 1, cols.base - cols.reach};
    const BackwardKernel kernel =
        input_gradient_ ? BackwardKernelOf<true>(plan.strip_cols) : BackwardKernelOf<false>(plan.strip_cols);
    workers.ForEach(chunks, [&](int64_t slot, int64_t chunk) {
      Vec* tile = reinterpret_cast<Vec*>(slot_data) + slot * slot_vectors;
      Vec* strip_input = tile + tile_vectors;
      Vec* strip_gradient = strip_input + strip_vectors;
      float* zeros = reinterpret_cast<float*>(strip_gradient + strip_vectors);
      std::fill(zeros, zeros + std::max(channels, filters), 0.0f);
      float* sums = reinterpret_cast<float*>(chunk_data) + chunk * chunk_floats;
      std::fill(sums, sums + chunk_floats, 0.0f);
      Vec* bias_sums = reinterpret_cast<Vec*>(sums + sum_floats);
      const int64_t last = plan.groups * (chunk + 1) / chunks;
      for (int64_t group = plan.groups * chunk / chunks; group < last; ++group) {
        const Lanes lanes = plan.LanesOf(group);
        Pack(gradient, lanes, gradient_walk, {0, 0, plan.tile_rows + rows.reach, plan.packed_cols}, zeros, tile,
             plan.channel_stride, plan.packed_cols);
        if (bias_gradient_) AddOwnPixels(tile, plan, rows, cols, filters, bias_sums);
        for (int64_t phase = 0; phase < phases; ++phase) {
          const int64_t row_shift = rows.phases[phase / cols.phases.size()] - rows.pad + rows.base * rows.stride;
          const int64_t col_shift = cols.phases[phase % cols.phases.size()] - cols.pad + cols.base * cols.stride;
          const Walk walk{rows.stride, row_shift, cols.stride, col_shift};
          const int32_t* starts = index.starts + phase * phase_lists;
          for (int64_t row = 0; row < plan.tile_rows; ++row) {
            for (int64_t col = 0; col < plan.tile_cols; col += plan.strip_cols) {
              const Window window{row, col, 1, plan.strip_cols};
              int64_t at[kMaxStrip * kLanes];
              Locate(lanes, walk, window, rows.in, cols.in, channels, at);
              const char* operand = reinterpret_cast<const char*>(tile + row * plan.packed_cols + col);
              ValueSums value_sums(sums, starts[0]);
              for (int64_t list = 0; list < phase_lists; list += channels) {
                const bool last = input_gradient_ && list + channels == phase_lists;
                for (int64_t channel = 0; channel < channels; channel += kLanes) {
                  const int count = static_cast<int>(std::min<int64_t>(kLanes, channels - channel));
                  Vec* in = strip_input + channel * plan.strip_cols * kept;
                  Vec* result = strip_gradient + channel * plan.strip_cols * kept;
                  if (list == 0) {
                    for (int64_t i = 0; i < plan.strip_cols; ++i) {
                      PackPixel(input, at + i * kLanes, zeros, channel, channel + count, in + i, plan.strip_cols);
                    }
                  }
                  const bool more = list == 0 && channel + kLanes < channels;
                  const Ahead inputs{more ? input.data + channel + kLanes : nullptr, at};
                  const Ahead results{last ? dx_data + channel : nullptr, at};
                  kernel(entries, starts + list + channel, count, operand, in, list == 0, result, &value_sums, inputs,
                         results);
                  if (!last) continue;
                  for (int64_t i = 0; i < plan.strip_cols; ++i) {
                    UnpackPixel(result + i, plan.strip_cols, at + i * kLanes, channel, count, nullptr, false, dx_data);
                  }
                }
              }
              value_sums.FlushAll(starts[phase_lists]);
            }
          }
        }
      }
    });

    const float* partial = reinterpret_cast<const float*>(chunk_data);
    workers.ForEach(CeilDiv(index.entries, kSerialEntries), [&](int64_t, int64_t job) {
      const int64_t end = std::min(index.entries, (job + 1) * kSerialEntries);
      for (int64_t e = job * kSerialEntries; e < end; ++e) {
        float sum = partial[e];
        for (int64_t chunk = 1; chunk < chunks; ++chunk) sum += partial[chunk * chunk_floats + e];
        dvalues_data[index.values[e]] = sum;
      }
    });
    for (int64_t filter = 0; filter < dbias->NumElements(); ++filter) {
      float sum = 0.0f;
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const float* lanes = partial + chunk * chunk_floats + sum_floats + filter * kLanes;
        for (int l = 0; l < kLanes; ++l) sum += lanes[l];
      }
      dbias_data[filter] = sum;
    }
  }

 private:
  // Tiles overlap in the output; each output pixel is counted by the one tile that it belongs to.
  static void AddOwnPixels(const Vec* tile, const Plan& plan, const Axis& rows, const Axis& cols, int64_t filters,
                           Vec* sums) {
    for (int64_t filter = 0; filter < filters; ++filter) {
      Vec sum = sums[filter];
      for (int64_t row = 0; row < plan.tile_rows; ++row) {
        const Vec* line = tile + filter * plan.channel_stride +
                          (row + rows.reach - rows.base) * plan.packed_cols + cols.reach - cols.base;
        for (int64_t col = 0; col < plan.tile_cols; ++col) sum += line[col];
      }
      sums[filter] = sum;
    }
  }

  Attributes attributes_;
  bool relu_, input_gradient_, bias_gradient_;
};

absl::Status ConvShape(InferenceContext* c) {
  using tensorflow::shape_inference::DimensionHandle;
    ShapeHandle x;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 4, &x));
  Attributes attributes;
  TF_RETURN_IF_ERROR(c->GetAttr("kernel", &attributes.kernel));
  TF_RETURN_IF_ERROR(c->GetAttr("strides", &attributes.strides));
  TF_RETURN_IF_ERROR(c->GetAttr("dilations", &attributes.dilations));
  TF_RETURN_IF_ERROR(c->GetAttr("padding", &attributes.padding));
  TF_RETURN_IF_ERROR(c->GetAttr("pads", &attributes.pads));
  TF_RETURN_IF_ERROR(attributes.Check());
  int64_t filters;
  TF_RETURN_IF_ERROR(c->GetAttr("filters", &filters));
  DimensionHandle out[2];
  for (int i = 0; i < 2; ++i) {
    const DimensionHandle in = c->Dim(x, i + 1);
    out[i] = c->UnknownDim();
    if (!c->ValueKnown(in)) continue;
    Axis axis;
    TF_RETURN_IF_ERROR(attributes.Resolve(c->Value(in), i, &axis));
    out[i] = c->MakeDim(axis.out);
  }
  c->set_output(0, c->MakeShape({c->Dim(x, 0), out[0], out[1], c->MakeDim(filters)}));
  return absl::OkStatus();
}

REGISTER_OP("SparsekitConv")
    .Input("x: float")
    .Input("values: float")
    .Input("bias: float")
    .Input("starts: int32")
    .Input("taps: int32")
    .Input("places: int32")
    .Output("y: float")
    .Attr("filters: int >= 1")
    .Attr("kernel: list(int)")
    .Attr("strides: list(int)")
    .Attr("dilations: list(int)")
    .Attr("padding: {'SAME', 'VALID', 'EXPLICIT'}")
    .Attr("pads: list(int) = []")
    .Attr("relu: bool = false")
    .SetShapeFn(ConvShape);

REGISTER_OP("SparsekitConvGrad")
    .Input("x: float")
    .Input("values: float")
    .Input("y: float")
    .Input("dy: float")
    .Input("starts: int32")
    .Input("taps: int32")
    .Input("places: int32")
    .Output("dx: float")
    .Output("dvalues: float")
    .Output("dbias: float")
    .Attr("kernel: list(int)")
    .Attr("strides: list(int)")
    .Attr("dilations: list(int)")
    .Attr("padding: {'SAME', 'VALID', 'EXPLICIT'}")
    .Attr("pads: list(int) = []")
    .Attr("relu: bool = false")
    .Attr("input_gradient: bool = true")
    .Attr("bias_gradient: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      bool input_gradient, bias_gradient;
      TF_RETURN_IF_ERROR(c->GetAttr("input_gradient", &input_gradient));
      TF_RETURN_IF_ERROR(c->GetAttr("bias_gradient", &bias_gradient));
      c->set_output(0, input_gradient ? c->input(0) : c->UnknownShapeOfRank(4));
      c->set_output(1, c->input(1));
      c->set_output(2, bias_gradient ? c->UnknownShapeOfRank(1) : c->Vector(0));
      return absl::OkStatus();
    });

REGISTER_KERNEL_BUILDER(Name("SparsekitConv").Device(DEVICE_CPU), ConvOp);
REGISTER_KERNEL_BUILDER(Name("SparsekitConvGrad").Device(DEVICE_CPU), ConvGradOp);

}  // namespace
}  // namespace sparsekit
