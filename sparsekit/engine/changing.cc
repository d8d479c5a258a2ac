// What a mask that changes during training needs: choose what is dropped, and take it out of everything kept by position.

#include <cstring>
#include <numeric>
#include <vector>

#include "bits.h"
#include "parallel.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sparsekit {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::errors::InvalidArgument;

constexpr int kLowBits = 16;
constexpr int64_t kHigh = int64_t{1} << (31 - kLowBits);
constexpr int64_t kLow = int64_t{1} << kLowBits;

const uint8_t* Bytes(const Tensor& tensor) { return static_cast<const uint8_t*>(tensor.data()); }
uint8_t* Bytes(Tensor* tensor) { return static_cast<uint8_t*>(tensor->data()); }

// Magnitudes in the order of unsigned numbers; NaN is above all.
uint32_t Magnitude(const float* value) {
  uint32_t bits;
  std::memcpy(&bits, value, sizeof bits);
  return bits & 0x7fffffffu;
}

// `size` elements cut into equal parts, one a thread.
struct Cut {
  int64_t size, parts;
  Cut(OpKernelContext* context, int64_t size) : size(size), parts(Workers(context, 2.0 * size)) {}
  int64_t Begin(int64_t part) const { return size * part / parts; }
  int64_t End(int64_t part) const { return size * (part + 1) / parts; }
};

// Takes the histograms of all parts together; the first bin whose cumulative count reaches `wanted`, of which what lies
// in the bins below is taken off.
int64_t Find(const std::vector<std::vector<int32_t>>& counts, int64_t bins, int64_t* wanted) {
  for (int64_t bin = 0; bin < bins; ++bin) {
    int64_t count = 0;
    for (const auto& part : counts) count += part[bin];
    if (*wanted <= count) return bin;
    *wanted -= count;
  }
  return bins;
}

// The mask with its smallest magnitudes dropped, until `zeros` positions are; of equal ones the first go first.
class DropSmallestOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& weight = context->input(0);
    const Tensor& keep = context->input(1);
    OP_REQUIRES(context, keep.shape() == weight.shape(),
                InvalidArgument("keep has shape ", keep.shape().DebugString(), ", the weight ",
                                weight.shape().DebugString()));
    OP_REQUIRES(context, context->input(2).dims() == 0, InvalidArgument("zeros must be one number"));
    const int64_t zeros = context->input(2).scalar<int64_t>()();
    Tensor* left = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, keep.shape(), &left));
    const float* values = Floats(weight);
    const uint8_t* kept = Bytes(keep);
    uint8_t* to = Bytes(left);
    const Cut cut(context, weight.NumElements());

    std::vector<std::vector<int32_t>> counts(cut.parts);
    std::vector<int64_t> dropped(cut.parts, 0);
    Parallel(context, cut.parts, [&](int64_t part) {
      counts[part].assign(kHigh, 0);
      for (int64_t i = cut.Begin(part); i < cut.End(part); ++i) {
        if (kept[i] == 0) {
          ++dropped[part];
        } else {
          ++counts[part][Magnitude(values + i) >> kLowBits];
        }
      }
    });
    int64_t wanted = zeros - std::accumulate(dropped.begin(), dropped.end(), int64_t{0});
    if (wanted <= 0) {
      std::memcpy(to, kept, cut.size);
      return;
    }
    const int64_t high = Find(counts, kHigh, &wanted);
    Parallel(context, cut.parts, [&](int64_t part) {
      counts[part].assign(kLow, 0);
      for (int64_t i = cut.Begin(part); i < cut.End(part); ++i) {
        const uint32_t magnitude = Magnitude(values + i);
        if (kept[i] != 0 && magnitude >> kLowBits == high) ++counts[part][magnitude & (kLow - 1)];
      }
    });
    // If more are to go than there are, all go.
    const int64_t low = high == kHigh ? 0 : Find(counts, kLow, &wanted);
    const uint32_t threshold = static_cast<uint32_t>(high << kLowBits | low);
    std::vector<int64_t> ties(cut.parts + 1, 0);
    for (int64_t part = 0; part < cut.parts; ++part) ties[part + 1] = ties[part] + counts[part][low];
    Parallel(context, cut.parts, [&](int64_t part) {
      int64_t tie = ties[part];
      for (int64_t i = cut.Begin(part); i < cut.End(part); ++i) {
        const uint32_t magnitude = Magnitude(values + i);
        bool stays = kept[i] != 0 && magnitude >= threshold;
        if (stays && magnitude == threshold) stays = tie++ >= wanted;
        to[i] = stays;
      }
    });
  }
};

// Variables of a kernel's kept values (the values, optimizer slots) without the values that are masked; the kernel's own
// mask loses these positions too. All in one op, so that they agree whatever else fails in the same step.
class ShrinkOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const int count = context->num_inputs();
    std::vector<tensorflow::core::RefCountPtr<tensorflow::Var>> variables(count);
    for (int i = 0; i < count; ++i) {
      OP_REQUIRES_OK(context,
                     tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, i), &variables[i]));
    }
    // Always in the order of addresses, as whoever locks several of them has to.
    std::vector<tensorflow::mutex*> mutexes;
    for (const auto& variable : variables) mutexes.push_back(variable->mu());
    std::sort(mutexes.begin(), mutexes.end());
    std::vector<std::unique_ptr<tensorflow::mutex_lock>> locks;
    for (tensorflow::mutex* mutex : mutexes) locks.push_back(std::make_unique<tensorflow::mutex_lock>(*mutex));

    Tensor* mask = variables[0]->tensor();
    Tensor* alive = variables[1]->tensor();
    const int64_t kept = alive->NumElements();
    OP_REQUIRES(context, mask->dtype() == tensorflow::DT_BOOL && alive->dtype() == tensorflow::DT_BOOL,
                InvalidArgument("shrink needs two masks"));
    for (int i = 2; i < count; ++i) {
      const Tensor* array = variables[i]->tensor();
      OP_REQUIRES(context, array->dtype() == tensorflow::DT_FLOAT && array->NumElements() == kept,
                  InvalidArgument("shrink needs float32 vectors of ", kept, " values, got shape ",
                                  array->shape().DebugString()));
    }
    const Cut cut(context, kept);
    std::vector<int64_t> starts = Starts(context, cut, Bytes(*alive));
    const int64_t left = starts.back();
    const Cut whole(context, mask->NumElements());
    std::vector<int64_t> offsets = Starts(context, whole, Bytes(*mask));
    OP_REQUIRES(context, offsets.back() == kept,
                InvalidArgument("the mask keeps ", offsets.back(), " weights, but there are ", kept, " values"));

    // In its own memory, unless somebody still holds a value that was read from it.
    const bool alone = mask->RefCountIsOne();
    Tensor narrowed = *mask;
    Tensor ones;
    if (!alone) {
      OP_REQUIRES_OK(context, context->allocate_temp(tensorflow::DT_BOOL, mask->shape(), &narrowed));
      std::memcpy(Bytes(&narrowed), Bytes(*mask), mask->NumElements());
    }
    OP_REQUIRES_OK(context, context->allocate_temp(tensorflow::DT_BOOL, TensorShape({left}), &ones));
    std::vector<Tensor> arrays(count - 2);
    for (Tensor& array : arrays) {
      OP_REQUIRES_OK(context, context->allocate_temp(tensorflow::DT_FLOAT, TensorShape({left}), &array));
    }
    std::memset(Bytes(&ones), 1, left);
    Parallel(context, whole.parts, [&](int64_t part) {
      const uint8_t* lives = Bytes(*alive) + offsets[part];
      uint8_t* bytes = Bytes(&narrowed);
      ForEachSet(bytes, whole.Begin(part), whole.End(part), [&](int64_t i) { bytes[i] = *lives++; });
    });
    Parallel(context, cut.parts, [&](int64_t part) {
      const uint8_t* lives = Bytes(*alive);
      for (int i = 2; i < count; ++i) {
        const float* from = Floats(*variables[i]->tensor());
        float* to = Floats(&arrays[i - 2]) + starts[part];
        for (int64_t k = cut.Begin(part); k < cut.End(part); ++k) {
          if (lives[k] != 0) *to++ = from[k];
        }
      }
    });
    *mask = narrowed;
    *alive = ones;
    for (int i = 2; i < count; ++i) *variables[i]->tensor() = arrays[i - 2];
  }

 private:
  // Where each part's set bytes begin when they are counted through; last their number.
  static std::vector<int64_t> Starts(OpKernelContext* context, const Cut& cut, const uint8_t* bytes) {
    std::vector<int64_t> starts(cut.parts + 1, 0);
    Parallel(context, cut.parts, [&](int64_t part) {
      starts[part + 1] = CountSet(bytes, cut.Begin(part), cut.End(part));
    });
    std::partial_sum(starts.begin(), starts.end(), starts.begin());
    return starts;
  }
};

REGISTER_OP("SparsekitDropSmallest")
    .Input("weight: float")
    .Input("keep: bool")
    .Input("zeros: int64")
    .Output("left: bool")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->input(1));
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("SparsekitDropSmallest").Device(tensorflow::DEVICE_CPU), DropSmallestOp);

REGISTER_OP("SparsekitShrink")
    .Input("keep: resource")
    .Input("alive: resource")
    .Input("arrays: count * resource")
    .Attr("count: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext*) { return absl::OkStatus(); });
REGISTER_KERNEL_BUILDER(Name("SparsekitShrink").Device(tensorflow::DEVICE_CPU), ShrinkOp);

}  // namespace
}  // namespace sparsekit
