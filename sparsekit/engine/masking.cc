// Hold masked positions at zero in one pass, in the memory where the values are.

#include <cstring>

#include "parallel.h"
#include "tensorflow.h"

namespace sparsekit {
namespace {

constexpr int64_t kBlock = 16384;  // elements of one piece of work
constexpr int64_t kLook = 1024;    // elements that are looked at before they are written

template <typename Work>
void InBlocks(OpKernelContext* context, int64_t size, const Work& work) {
  const int64_t blocks = (size + kBlock - 1) / kBlock;
  const int64_t workers = std::min(blocks, Workers(context, static_cast<double>(size)));
  Parallel(context, workers, [&](int64_t worker) {
    work(blocks * worker / workers * kBlock, std::min(size, blocks * (worker + 1) / workers * kBlock));
  });
}

// Bits are selected, not numbers multiplied: a masked NaN becomes +0 too. The compiler makes vectors of this loop.
void KeepOnly(const uint8_t* keep, const float* from, float* to, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof bits);
    bits &= -static_cast<uint32_t>(keep[i] != 0);
    std::memcpy(to + i, &bits, sizeof bits);
  }
}

// The same, and positions that are zero (of either sign) are masked from now on.
void KeepOnlyAndDrop(uint8_t* keep, const float* from, float* to, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof bits);
    const uint8_t kept = static_cast<uint8_t>((keep[i] != 0) & ((bits & 0x7fffffffu) != 0));
    keep[i] = kept;
    bits &= -static_cast<uint32_t>(kept);
    std::memcpy(to + i, &bits, sizeof bits);
  }
}

// Whether there is nothing to write: what is masked is +0 (and, for dropping, what is kept is not zero). After an update
// with masked gradients that is so nearly always, and reading alone costs half.
bool Holds(const uint8_t* keep, const float* values, int64_t begin, int64_t end, bool drop) {
  uint32_t wrong = 0;
  for (int64_t i = begin; i < end; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    const uint32_t kept = -static_cast<uint32_t>(keep[i] != 0);
    wrong |= bits & ~kept;
    if (drop) wrong |= kept & -static_cast<uint32_t>((bits & 0x7fffffffu) == 0);
  }
  return wrong == 0;
}

const uint8_t* Bytes(const Tensor& tensor) { return static_cast<const uint8_t*>(tensor.data()); }

// A tensor with masked positions at zero; written over its input where nobody else reads that.
class KeepOnlyOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    // No copy of the input is held here: it would count as a reader.
    const TensorShape shape = context->input(0).shape();
    const float* from = Floats(context->input(0));
    const Tensor& keep = context->input(1);
    OP_REQUIRES(context, keep.shape() == shape,
                InvalidArgument("keep has shape ", keep.shape().DebugString(), ", the value ", shape.DebugString()));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(context, context->forward_input_or_allocate_output({0}, 0, shape, &out));
    float* to = Floats(out);
    InBlocks(context, shape.num_elements(),
             [&](int64_t begin, int64_t end) { KeepOnly(Bytes(keep), from, to, begin, end); });
  }
};

// A variable and its mask, locked, in their own memory unless somebody still holds a value that was read from them.
class Masked {
 public:
  // `writes_mask`: the mask will be written to as well.
  absl::Status Lock(OpKernelContext* context, bool writes_mask) {
    TF_RETURN_IF_ERROR(variables_.Lock(context, 2));
    const Tensor* weight = weight_ = variables_[0];
    const Tensor* keep = keep_ = variables_[1];
    if (weight->dtype() != DT_FLOAT || keep->dtype() != DT_BOOL || keep->shape() != weight->shape()) {
      return InvalidArgument("a float32 variable and a bool variable of its shape are needed");
    }
    if (!weight->RefCountIsOne()) {
      TF_RETURN_IF_ERROR(context->allocate_temp(weight->dtype(), weight->shape(), &fresh_weight_));
      weight_ = &fresh_weight_;
    }
    if (writes_mask && !keep->RefCountIsOne()) {
      TF_RETURN_IF_ERROR(context->allocate_temp(keep->dtype(), keep->shape(), &fresh_keep_));
      keep_ = &fresh_keep_;
      std::memcpy(fresh_keep_.data(), keep->data(), keep->NumElements());
    }
    return absl::OkStatus();
  }

  const TensorShape& shape() { return variables_[0]->shape(); }
  const float* from() { return Floats(*variables_[0]); }
  float* to() { return Floats(weight_); }
  uint8_t* keep() { return static_cast<uint8_t*>(keep_->data()); }

  // Call when everything is written.
  void Commit() {
    if (weight_ != variables_[0]) *variables_[0] = fresh_weight_;
    if (keep_ != variables_[1]) *variables_[1] = fresh_keep_;
  }

 private:
  Locked variables_;
  Tensor fresh_weight_;
  Tensor fresh_keep_;
  Tensor* weight_ = nullptr;  // what to write to
  Tensor* keep_ = nullptr;
};

class HoldOp : public OpKernel {
 public:
  explicit HoldOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("drop", &drop_));
  }

  void Compute(OpKernelContext* context) override {
    Masked masked;
    OP_REQUIRES_OK(context, masked.Lock(context, drop_));
    const float* from = masked.from();
    float* to = masked.to();
    uint8_t* keep = masked.keep();
    InBlocks(context, masked.shape().num_elements(), [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; at += kLook) {
        const int64_t stop = std::min(end, at + kLook);
        if (from == to && Holds(keep, from, at, stop, drop_)) continue;
        if (drop_) {
          KeepOnlyAndDrop(keep, from, to, at, stop);
        } else {
          KeepOnly(keep, from, to, at, stop);
        }
      }
    });
    masked.Commit();
  }

 private:
  bool drop_;
};

// An optimizer's own write to a variable, `weight += sign * delta`, that leaves what is masked at zero: it spares the
// pass over the weight that HoldOp needs after it.
class AssignKeptOp : public OpKernel {
 public:
  explicit AssignKeptOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("subtract", &subtract_));
    OP_REQUIRES_OK(context, context->GetAttr("drop", &drop_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& delta = context->input(2);
    Masked masked;
    OP_REQUIRES_OK(context, masked.Lock(context, drop_));
    OP_REQUIRES(context, delta.shape() == masked.shape(),
                InvalidArgument("the variable has shape ", masked.shape().DebugString(), ", what is added ",
                                delta.shape().DebugString()));
    const float* from = masked.from();
    const float* by = Floats(delta);
    float* to = masked.to();
    uint8_t* keep = masked.keep();
    InBlocks(context, masked.shape().num_elements(), [&](int64_t begin, int64_t end) {
      // In pieces that stay in the first cache until they are masked.
      for (int64_t at = begin; at < end; at += kLook) {
        const int64_t stop = std::min(end, at + kLook);
        if (subtract_) {
          for (int64_t i = at; i < stop; ++i) to[i] = from[i] - by[i];
        } else {
          for (int64_t i = at; i < stop; ++i) to[i] = from[i] + by[i];
        }
        if (drop_) {
          KeepOnlyAndDrop(keep, to, to, at, stop);
        } else {
          KeepOnly(keep, to, to, at, stop);
        }
      }
    });
    masked.Commit();
  }

 private:
  bool subtract_;
  bool drop_;
};

REGISTER_OP("SparsekitKeepOnly")
    .Input("value: float")
    .Input("keep: bool")
    .Output("kept: float")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(0));
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("SparsekitKeepOnly").Device(DEVICE_CPU), KeepOnlyOp);

REGISTER_OP("SparsekitHold")
    .Input("weight: resource")
    .Input("keep: resource")
    .Attr("drop: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext*) { return absl::OkStatus(); });
REGISTER_KERNEL_BUILDER(Name("SparsekitHold").Device(DEVICE_CPU), HoldOp);

REGISTER_OP("SparsekitAssignKept")
    .Input("weight: resource")
    .Input("keep: resource")
    .Input("delta: float")
    .Attr("subtract: bool")
    .Attr("drop: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext*) { return absl::OkStatus(); });
REGISTER_KERNEL_BUILDER(Name("SparsekitAssignKept").Device(DEVICE_CPU), AssignKeptOp);

}  // namespace
}  // namespace sparsekit
