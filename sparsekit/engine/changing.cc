// What a mask that changes during training needs: choose what is dropped, and take it out of everything kept by position.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "bits.h"
#include "parallel.h"
#include "tensorflow.h"

namespace sparsekit {
namespace {

constexpr int kLowBits = 16;
constexpr int64_t kBins = int64_t{1} << (31 - kLowBits);

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

    // The last magnitude that goes lies in a bin of those that agree in their upper bits, ...
    std::vector<std::vector<int32_t>> counts(cut.parts);
    Parallel(context, cut.parts, [&](int64_t part) {
      counts[part].assign(kBins, 0);
      int32_t* bins = counts[part].data();
      for (int64_t i = cut.Begin(part); i < cut.End(part); ++i) {
        if (kept[i] != 0) ++bins[Magnitude(values + i) >> kLowBits];
      }
    });
    int64_t alive = 0;
    for (const auto& part : counts) alive += std::accumulate(part.begin(), part.end(), int64_t{0});
    int64_t wanted = zeros - (cut.size - alive);
    if (wanted <= 0 || wanted >= alive) {
      // None goes, or all do.
      if (wanted <= 0) {
        std::memcpy(to, kept, cut.size);
      } else {
        std::memset(to, 0, cut.size);
      }
      return;
    }
    uint32_t bin = 0;
    for (;; ++bin) {
      int64_t count = 0;
      for (const auto& part : counts) count += part[bin];
      if (wanted <= count) break;
      wanted -= count;
    }

    // ... which are few, so that they can be put in order.
    std::vector<std::vector<uint32_t>> near(cut.parts);
    Parallel(context, cut.parts, [&](int64_t part) {
      near[part].reserve(counts[part][bin]);
      for (int64_t i = cut.Begin(part); i < cut.End(part); ++i) {
        const uint32_t magnitude = Magnitude(values + i);
        if (magnitude >> kLowBits == bin && kept[i] != 0) near[part].push_back(magnitude);
      }
    });
    std::vector<uint32_t> ordered;
    for (const auto& part : near) ordered.insert(ordered.end(), part.begin(), part.end());
    std::nth_element(ordered.begin(), ordered.begin() + (wanted - 1), ordered.end());
    const uint32_t threshold = ordered[wanted - 1];
    for (uint32_t magnitude : ordered) wanted -= magnitude < threshold;
    // How many that are equal to the threshold come before each part.
    std::vector<int64_t> equal(cut.parts + 1, 0);
    for (int64_t part = 0; part < cut.parts; ++part) {
      equal[part + 1] = equal[part] + std::count(near[part].begin(), near[part].end(), threshold);
    }
    Parallel(context, cut.parts, [&](int64_t part) {
      const int64_t begin = cut.Begin(part);
      const int64_t end = cut.End(part);
      for (int64_t i = begin; i < end; ++i) to[i] = kept[i] & (Magnitude(values + i) > threshold);
      if (equal[part + 1] <= wanted) return;
      int64_t seen = equal[part];
      for (int64_t i = begin; i < end; ++i) {
        if (kept[i] != 0 && Magnitude(values + i) == threshold) to[i] = seen++ >= wanted;
      }
    });
  }
};

// A vector, 32 bits an element, without those at some places in ascending order.
void Without(const Tensor& from, const std::vector<int32_t>& places, Tensor* to) {
  const int32_t* source = Ints(from);
  int32_t* target = Ints(to);
  int64_t begin = 0;
  const auto copy = [&](int64_t end) {
    std::memcpy(target, source + begin, (end - begin) * sizeof *source);
    target += end - begin;
    begin = end + 1;
  };
  for (int32_t place : places) copy(place);
  copy(from.NumElements());
}

// Segments without the elements at some places in ascending order.
void Shorten(const Tensor& pointers, const std::vector<int32_t>& places, Tensor* to) {
  const int32_t* from = Ints(pointers);
  int32_t* target = Ints(to);
  int64_t before = 0;
  const int64_t taken = places.size();
  for (int64_t i = 0; i < pointers.NumElements(); ++i) {
    while (before < taken && places[before] < from[i]) ++before;
    target[i] = static_cast<int32_t>(from[i] - before);
  }
}

// Takes masked values out of the variables of a kernel's kept values (the values, optimizer slots), out of the kernel's
// own mask and, where they are given, out of its index arrays. All in one op, so that they agree whatever else fails in
// the same step. Few values go at a time, and work that grows with the size of the mask is avoided.
class ShrinkOp : public OpKernel {
 public:
  explicit ShrinkOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("share", &share_));
    OP_REQUIRES_OK(context, context->GetAttr("count", &count_));
    OP_REQUIRES_OK(context, context->GetAttr("indices", &indices_));
    OP_REQUIRES(context, indices_ == 0 || indices_ == 5, InvalidArgument("a structure has five index arrays"));
  }

  void Compute(OpKernelContext* context) override {
    const int count = context->num_inputs();
    Locked variables;
    OP_REQUIRES_OK(context, variables.Lock(context, count));
    Tensor* changed = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &changed));
    changed->scalar<bool>()() = false;
    Tensor* mask = variables[0];
    Tensor* alive = variables[1];
    const int64_t kept = alive->NumElements();
    OP_REQUIRES(context, mask->dtype() == DT_BOOL && alive->dtype() == DT_BOOL,
                InvalidArgument("shrink needs two masks"));
    std::vector<Tensor*> arrays;
    for (int i = 0; i < count_; ++i) {
      arrays.push_back(variables[2 + i]);
      OP_REQUIRES(context, arrays[i]->dtype() == DT_FLOAT && arrays[i]->NumElements() == kept,
                  InvalidArgument("shrink needs float32 vectors of ", kept, " values, got shape ",
                                  arrays[i]->shape().DebugString()));
    }
    std::vector<int32_t> dead;
    const uint8_t* lives = Bytes(*alive);
    ForEachUnset(lives, 0, kept, [&](int64_t k) { dead.push_back(static_cast<int32_t>(k)); });
    if (dead.empty() || dead.size() <= share_ * kept) return;
    const int64_t left = kept - static_cast<int64_t>(dead.size());

    std::vector<int64_t> positions;
    const absl::Status found = indices_ == 0 ? Look(*mask, kept, dead, &positions)
                                             : Find(*mask, *variables[2 + count_],
                                                    *variables[3 + count_], kept, dead, &positions);
    OP_REQUIRES_OK(context, found);

    std::vector<Tensor> shorter(count);
    for (int i = 1; i < count; ++i) {
      const Tensor* array = variables[i];
      const bool pointers = i == 2 + count_ || i == 4 + count_;
      const TensorShape shape = pointers ? array->shape() : TensorShape({left});
      OP_REQUIRES_OK(context, context->allocate_temp(array->dtype(), shape, &shorter[i]));
    }
    std::memset(Bytes(&shorter[1]), 1, left);
    for (int i = 2; i < 2 + count_; ++i) Without(*variables[i], dead, &shorter[i]);
    if (indices_ != 0) {
      const Tensor* from[5];
      for (int i = 0; i < 5; ++i) from[i] = variables[2 + count_ + i];
      OP_REQUIRES_OK(context, Narrow(context, from, dead, &shorter[2 + count_]));
    }

    // In its own memory, unless somebody still holds a value that was read from it.
    if (!mask->RefCountIsOne()) {
      OP_REQUIRES_OK(context, context->allocate_temp(DT_BOOL, mask->shape(), &shorter[0]));
      std::memcpy(Bytes(&shorter[0]), Bytes(*mask), mask->NumElements());
      *mask = shorter[0];
    }
    uint8_t* bytes = Bytes(mask);
    for (int64_t position : positions) bytes[position] = 0;
    for (int i = 1; i < count; ++i) *variables[i] = shorter[i];
    changed->scalar<bool>()() = true;
  }

 private:
  // The positions in the mask of some of its kept values, by counting through it.
  static absl::Status Look(const Tensor& mask, int64_t kept, const std::vector<int32_t>& places,
                           std::vector<int64_t>* positions) {
    int64_t k = 0;
    size_t next = 0;
    ForEachSet(Bytes(mask), 0, mask.NumElements(), [&](int64_t position) {
      if (next < places.size() && places[next] == k) {
        positions->push_back(position);
        ++next;
      }
      ++k;
    });
    if (k != kept) return InvalidArgument("the mask keeps ", k, " weights, but there are ", kept, " values");
    return absl::OkStatus();
  }

  // The same by the index arrays.
  static absl::Status Find(const Tensor& mask, const Tensor& pointers, const Tensor& columns, int64_t kept,
                           const std::vector<int32_t>& places, std::vector<int64_t>* positions) {
    TF_RETURN_IF_ERROR(CheckPointers("row_pointers", pointers, kept));
    TF_RETURN_IF_ERROR(CheckVector("columns", columns, kept));
    const int64_t inputs = pointers.NumElements() - 1;
    const int64_t outputs = inputs == 0 ? 0 : mask.NumElements() / inputs;
    const int32_t* at = Ints(pointers);
    const int32_t* column_of = Ints(columns);
    const uint8_t* bytes = Bytes(mask);
    int64_t row = 0;
    for (int32_t place : places) {
      while (at[row + 1] <= place) ++row;
      const int64_t position = row * outputs + column_of[place];
      if (column_of[place] < 0 || column_of[place] >= outputs || bytes[position] == 0) {
        return InvalidArgument("the index arrays are not those of the mask");
      }
      positions->push_back(position);
    }
    return absl::OkStatus();
  }

  // The index arrays without the values at some places.
  static absl::Status Narrow(OpKernelContext* context, const Tensor* const* from, const std::vector<int32_t>& dead,
                             Tensor* to) {
    const int64_t kept = from[1]->NumElements();
    TF_RETURN_IF_ERROR(CheckPointers("column_pointers", *from[2], kept));
    TF_RETURN_IF_ERROR(CheckVector("rows", *from[3], kept));
    TF_RETURN_IF_ERROR(CheckVector("permutation", *from[4], kept));
    Shorten(*from[0], dead, &to[0]);
    Without(*from[1], dead, &to[1]);

    // What becomes of each place.
    std::unique_ptr<int32_t[]> places(new int32_t[kept]);
    int32_t next = 0;
    int32_t k = 0;
    for (int32_t place : dead) {
      while (k < place) places[k++] = next++;
      places[k++] = -1;
    }
    while (k < kept) places[k++] = next++;

    const int64_t outputs = from[2]->NumElements() - 1;
    const int64_t parts = Workers(context, 4.0 * kept);
    const int32_t* at = Ints(*from[2]);
    std::vector<int64_t> begins(parts + 1);
    for (int64_t part = 0; part <= parts; ++part) begins[part] = Boundary(at, outputs, part, parts, 1, 8);
    // How many go before each part.
    std::vector<int64_t> before(parts + 1, 0);
    const int32_t* columns = Ints(*from[1]);
    for (int32_t place : dead) {
      for (int64_t part = parts; part > 0 && columns[place] < begins[part]; --part) ++before[part];
    }
    std::atomic<bool> bad{false};
    // Pointers are taken out of the loops: asking a tensor for its data costs as much as an element's work.
    const int32_t* rows = Ints(*from[3]);
    const int32_t* permutation = Ints(*from[4]);
    int32_t* column_at = Ints(&to[2]);
    int32_t* row_of = Ints(&to[3]);
    int32_t* place_of = Ints(&to[4]);
    Parallel(context, parts, [&](int64_t part) {
      int64_t next = at[begins[part]] - before[part];
      const int64_t stop = at[begins[part + 1]] - before[part + 1];
      for (int64_t o = begins[part]; o < begins[part + 1]; ++o) {
        column_at[o] = static_cast<int32_t>(next);
        for (int64_t t = at[o]; t < at[o + 1]; ++t) {
          const bool known = static_cast<uint32_t>(permutation[t]) < static_cast<uint32_t>(kept);
          const int32_t place = known ? places[permutation[t]] : 0;
          if (place < 0) continue;
          if (!known || next == stop) {
            bad = true;
            return;
          }
          row_of[next] = rows[t];
          place_of[next++] = place;
        }
      }
      if (next != stop) bad = true;
    });
    column_at[outputs] = static_cast<int32_t>(kept - static_cast<int64_t>(dead.size()));
    if (bad) return InvalidArgument("the index arrays do not belong together");
    return absl::OkStatus();
  }

  float share_;
  int count_, indices_;
};

REGISTER_OP("SparsekitDropSmallest")
    .Input("weight: float")
    .Input("keep: bool")
    .Input("zeros: int64")
    .Output("left: bool")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(1));
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("SparsekitDropSmallest").Device(DEVICE_CPU), DropSmallestOp);

REGISTER_OP("SparsekitShrink")
    .Input("keep: resource")
    .Input("alive: resource")
    .Input("arrays: count * resource")
    .Input("structure: indices * resource")
    .Output("changed: bool")
    .Attr("count: int >= 1")
    .Attr("indices: int >= 0")
    .Attr("share: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("SparsekitShrink").Device(DEVICE_CPU), ShrinkOp);

}  // namespace
}  // namespace sparsekit
