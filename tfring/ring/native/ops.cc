// The ring's collectives as TensorFlow ops, on TensorFlow's C API.
//
// Every op takes the communicator's token, a resource nobody reads: TensorFlow's automatic control
// dependencies then run the collectives of one communicator in program order. Kernels are synchronous: the
// done callback of the C API's asynchronous kernels may not be kept past the call, and a collective waits for
// peers only, never for another op.
#include <cstring>
#include <string>
#include <vector>

#include "core.h"
#include "dtype.h"
#include "tf_api.h"

namespace tfring {
namespace {

constexpr char kTypes[] =
    "{float, double, half, bfloat16, int8, int16, int32, int64, uint8, uint16, uint32, uint64, complex64, "
    "complex128, bool}";

class ScopedStatus {
 public:
  ScopedStatus() : status_(tf.TF_NewStatus()) {}
  ~ScopedStatus() { tf.TF_DeleteStatus(status_); }
  ScopedStatus(const ScopedStatus&) = delete;
  ScopedStatus& operator=(const ScopedStatus&) = delete;
  TF_Status* get() { return status_; }
  bool ok() const { return tf.TF_GetCode(status_) == kTfOk; }

 private:
  TF_Status* status_;
};

// What a node was built with.
struct Attributes {
  int64_t handle = 0;
  int64_t op = 0;
  int64_t root = 0;
  std::string key;
};

// One call of a kernel: collects tensors, remembers the first failure, reports it at the end.
class Invocation {
 public:
  Invocation(const Attributes& attributes, TF_OpKernelContext* context)
      : attributes_(attributes), context_(context) {
    call_.name = attributes.key.c_str();
    call_.op = static_cast<int32_t>(attributes.op);
    call_.root = static_cast<int32_t>(attributes.root);
    call_.caller = TFRING_TENSORFLOW_OP;
  }
  ~Invocation() {
    for (TF_Tensor* tensor : held_) tf.TF_DeleteTensor(tensor);
    if (!status_.ok()) tf.TF_OpKernelContext_Failure(context_, status_.get());
  }
  Invocation(const Invocation&) = delete;
  Invocation& operator=(const Invocation&) = delete;

  bool ok() const { return status_.ok(); }
  tfring_call& call() { return call_; }
  tfring_error* error() { return &error_; }

  // Held until the end of the call. Null after a failure.
  TF_Tensor* input(int index) {
    TF_Tensor* tensor = nullptr;
    tf.TF_GetInput(context_, index, &tensor, status_.get());
    return hold(tensor);
  }

  std::vector<int64_t> input_dims(int index, TfDataType* dtype) {
    TF_Tensor* tensor = nullptr;
    tf.TF_GetInput(context_, index, &tensor, status_.get());
    std::vector<int64_t> dims;
    if (!ok()) return dims;
    for (int i = 0; i < tf.TF_NumDims(tensor); ++i) dims.push_back(tf.TF_Dim(tensor, i));
    *dtype = tf.TF_TensorType(tensor);
    tf.TF_DeleteTensor(tensor);
    return dims;
  }

  // Output `output` of the shape of input `index`, in that input's memory where nobody else needs it.
  void in_place(int index, int output, tfring_tensor* tensor, std::vector<int64_t>* dims) {
    TfDataType dtype = 0;
    *dims = input_dims(index, &dtype);
    if (!ok()) return;
    int forwarded = -1;
    TF_Tensor* result =
        hold(tf.TF_ForwardInputOrAllocateOutput(context_, &index, 1, output, dims->data(),
                                                static_cast<int>(dims->size()), &forwarded, status_.get()));
    if (!ok()) return;
    const TF_Tensor* source = forwarded < 0 ? input(index) : result;
    if (!ok()) return;
    *tensor = {tf.TF_TensorData(source), tf.TF_TensorData(result), dims->data(),
               static_cast<int32_t>(dims->size()), dtype};
  }

  void* allocate(int output, TfDataType dtype, const std::vector<int64_t>& dims) {
    size_t length = static_cast<size_t>(size_of(static_cast<DType>(dtype)));
    for (int64_t dim : dims) length *= static_cast<size_t>(dim);
    TF_Tensor* result = hold(tf.TF_AllocateOutput(context_, output, dtype, dims.data(),
                                                  static_cast<int>(dims.size()), length, status_.get()));
    return ok() ? tf.TF_TensorData(result) : nullptr;
  }

  void fail(int code, const std::string& message) { tf.TF_SetStatus(status_.get(), code, message.c_str()); }

  // Turns the core's answer into a status.
  void check(int code) {
    switch (code) {
      case TFRING_OK:
        return;
      case TFRING_MISMATCH:
      case TFRING_INVALID:
        return fail(kTfInvalidArgument, error_.message);
      case TFRING_PEER_LOST:
        return fail(kTfAborted, error_.message);
      case TFRING_TIMEOUT:
        return fail(kTfDeadlineExceeded, error_.message);
      case TFRING_INTERRUPTED:  // KeyboardInterrupt follows as soon as Python goes on
        return fail(kTfCancelled, error_.message);
      default:
        return fail(kTfInternal, error_.message);
    }
  }

  int64_t handle() const { return attributes_.handle; }
  TF_OpKernelContext* context() { return context_; }

 private:
  TF_Tensor* hold(TF_Tensor* tensor) {
    if (tensor != nullptr) held_.push_back(tensor);
    return tensor;
  }

  const Attributes& attributes_;
  TF_OpKernelContext* context_;
  ScopedStatus status_;
  tfring_call call_{};
  tfring_error error_{};
  std::vector<TF_Tensor*> held_;
};

// All inputs from `first` on, each with an output of its shape.
class InPlaceTensors {
 public:
  InPlaceTensors(Invocation* invocation, int first)
      : tensors_(static_cast<size_t>(tf.TF_NumInputs(invocation->context()) - first)),
        dims_(tensors_.size()) {
    for (int i = 0; i < count() && invocation->ok(); ++i) {
      const size_t at = static_cast<size_t>(i);
      invocation->in_place(first + i, i, &tensors_[at], &dims_[at]);
    }
  }

  const tfring_tensor* data() const { return tensors_.data(); }
  int count() const { return static_cast<int>(tensors_.size()); }

 private:
  std::vector<tfring_tensor> tensors_;
  std::vector<std::vector<int64_t>> dims_;  // to which the tensors point
};

void all_reduce(void* state, TF_OpKernelContext* context) {
  Invocation invocation(*static_cast<Attributes*>(state), context);
  const TF_Tensor* active = invocation.input(1);
  if (!invocation.ok()) return;
  invocation.call().inactive = *static_cast<const unsigned char*>(tf.TF_TensorData(active)) == 0;
  const InPlaceTensors tensors(&invocation, 2);  // after token and active
  if (!invocation.ok()) return;
  invocation.check(tfring_all_reduce(invocation.handle(), &invocation.call(), tensors.data(), tensors.count(),
                                     invocation.error()));
}

void broadcast(void* state, TF_OpKernelContext* context) {
  Invocation invocation(*static_cast<Attributes*>(state), context);
  const InPlaceTensors tensors(&invocation, 1);  // after token
  if (!invocation.ok()) return;
  invocation.check(tfring_broadcast(invocation.handle(), &invocation.call(), tensors.data(), tensors.count(),
                                    invocation.error()));
}

// The tensors of a gather, and where their rows go once the ring knows how many there are.
struct GatheredRows {
  Invocation* invocation;
  int world_size;
  int64_t* all_rows;  // the last output
  std::vector<tfring_tensor> tensors;
  std::vector<std::vector<int64_t>> dims;  // to which the tensors point

  static void place(void* context, const int64_t* rows, void** outputs, int32_t* placed) {
    GatheredRows& self = *static_cast<GatheredRows*>(context);
    const size_t count = self.tensors.size();
    std::memcpy(self.all_rows, rows, static_cast<size_t>(self.world_size) * count * sizeof(int64_t));
    for (size_t i = 0; i < count; ++i) {
      std::vector<int64_t> dims = self.dims[i];
      dims[0] = 0;
      for (int r = 0; r < self.world_size; ++r) dims[0] += rows[static_cast<size_t>(r) * count + i];
      outputs[i] = self.invocation->allocate(static_cast<int>(i), self.tensors[i].dtype, dims);
      if (!self.invocation->ok()) return;
    }
    *placed = 1;
  }
};

void all_gather_rows(void* state, TF_OpKernelContext* context) {
  constexpr int kFirst = 2;  // after token and num_rows
  Invocation invocation(*static_cast<Attributes*>(state), context);
  const TF_Tensor* num_rows = invocation.input(1);
  if (!invocation.ok()) return;
  const int count = tf.TF_NumInputs(context) - kFirst;
  const int world_size = tfring_world_size(invocation.handle());
  if (world_size < 0) return invocation.fail(kTfInvalidArgument, "this communicator is closed");
  if (tf.TF_NumDims(num_rows) != 1 || tf.TF_Dim(num_rows, 0) != count) {
    return invocation.fail(kTfInvalidArgument, "num_rows holds one number a tensor");
  }
  GatheredRows gathered{&invocation, world_size, nullptr, {}, {}};
  gathered.tensors.resize(static_cast<size_t>(count));
  gathered.dims.resize(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    std::vector<int64_t>& dims = gathered.dims[static_cast<size_t>(i)];
    const TF_Tensor* tensor = invocation.input(kFirst + i);
    if (!invocation.ok()) return;
    for (int d = 0; d < tf.TF_NumDims(tensor); ++d) dims.push_back(tf.TF_Dim(tensor, d));
    const int64_t rows = static_cast<const int64_t*>(tf.TF_TensorData(num_rows))[i];
    if (rows >= 0 && !dims.empty()) {
      if (rows > dims[0]) {
        return invocation.fail(kTfInvalidArgument,
                               std::string("all_gather_rows \"") + invocation.call().name + "\": tensor " +
                                   std::to_string(i) + " has capacity for " + std::to_string(dims[0]) +
                                   " rows, but num_rows is " + std::to_string(rows));
      }
      dims[0] = rows;
    }
    gathered.tensors[static_cast<size_t>(i)] = {tf.TF_TensorData(tensor), nullptr, dims.data(),
                                                static_cast<int32_t>(dims.size()), tf.TF_TensorType(tensor)};
  }
  gathered.all_rows = static_cast<int64_t*>(
      invocation.allocate(count, static_cast<TfDataType>(DType::kInt64), {world_size, count}));
  if (!invocation.ok()) return;
  const int code = tfring_all_gather(invocation.handle(), &invocation.call(), gathered.tensors.data(), count,
                                     &GatheredRows::place, &gathered, invocation.error());
  if (invocation.ok()) invocation.check(code);  // else memory was short
}

void reduce_scatter(void* state, TF_OpKernelContext* context) {
  Invocation invocation(*static_cast<Attributes*>(state), context);
  const TF_Tensor* input = invocation.input(1);
  if (!invocation.ok()) return;
  const int world_size = tfring_world_size(invocation.handle());
  if (world_size < 0) return invocation.fail(kTfInvalidArgument, "this communicator is closed");
  std::vector<int64_t> dims;
  for (int d = 0; d < tf.TF_NumDims(input); ++d) dims.push_back(tf.TF_Dim(input, d));
  std::vector<int64_t> out_dims = dims;
  if (!dims.empty()) {
    int64_t begin = 0;
    int64_t end = 0;
    tfring_chunk(dims[0], world_size, tfring_rank(invocation.handle()), &begin, &end);
    out_dims[0] = end - begin;
  }
  void* output = invocation.allocate(0, tf.TF_TensorType(input), out_dims);
  if (!invocation.ok()) return;
  const tfring_tensor tensor{tf.TF_TensorData(input), output, dims.data(), static_cast<int32_t>(dims.size()),
                             tf.TF_TensorType(input)};
  invocation.check(
      tfring_reduce_scatter(invocation.handle(), &invocation.call(), &tensor, 1, invocation.error()));
}

void barrier(void* state, TF_OpKernelContext* context) {
  Invocation invocation(*static_cast<Attributes*>(state), context);
  invocation.check(tfring_barrier(invocation.handle(), &invocation.call(), invocation.error()));
}

void* create(TF_OpKernelConstruction* construction) {
  ScopedStatus status;
  auto* attributes = new Attributes;
  int32_t list_size = 0;
  int32_t length = 0;
  tf.TF_OpKernelConstruction_GetAttrInt64(construction, "handle", &attributes->handle, status.get());
  if (status.ok()) tf.TF_OpKernelConstruction_GetAttrInt64(construction, "op", &attributes->op, status.get());
  if (status.ok())
    tf.TF_OpKernelConstruction_GetAttrInt64(construction, "root", &attributes->root, status.get());
  if (status.ok())
    tf.TF_OpKernelConstruction_GetAttrSize(construction, "key", &list_size, &length, status.get());
  if (status.ok()) {
    attributes->key.resize(static_cast<size_t>(length));
    tf.TF_OpKernelConstruction_GetAttrString(construction, "key", attributes->key.data(),
                                             attributes->key.size(), status.get());
  }
  if (!status.ok()) tf.TF_OpKernelConstruction_Failure(construction, status.get());
  return attributes;
}

void destroy(void* state) { delete static_cast<Attributes*>(state); }

// Output i has the shape of input first + i.
template <int kFirst>
void same_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  const int count = static_cast<int>(tf.TF_ShapeInferenceContextNumInputs(context)) - kFirst;
  TF_ShapeHandle* shape = tf.TF_NewShapeHandle();
  for (int i = 0; i < count && tf.TF_GetCode(status) == kTfOk; ++i) {
    tf.TF_ShapeInferenceContextGetInput(context, kFirst + i, shape, status);
    if (tf.TF_GetCode(status) == kTfOk) tf.TF_ShapeInferenceContextSetOutput(context, i, shape, status);
  }
  tf.TF_DeleteShapeHandle(shape);
}

// The first dimension is known when the op runs; ops.py sets the others.
void unknown_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  tf.TF_ShapeInferenceContextSetUnknownShape(context, status);
}

struct OpSpec {
  const char* name;
  std::vector<std::string> inputs;
  std::vector<std::string> outputs;
  std::vector<std::string> attributes;
  void (*shapes)(TF_ShapeInferenceContext*, TF_Status*);
  void (*compute)(void*, TF_OpKernelContext*);
};

std::string register_op(const OpSpec& spec) {
  ScopedStatus status;
  TF_OpDefinitionBuilder* builder = tf.TF_NewOpDefinitionBuilder(spec.name);
  tf.TF_OpDefinitionBuilderAddInput(builder, "token: resource");
  for (const std::string& input : spec.inputs) tf.TF_OpDefinitionBuilderAddInput(builder, input.c_str());
  for (const std::string& output : spec.outputs) tf.TF_OpDefinitionBuilderAddOutput(builder, output.c_str());
  for (const std::string& attribute : spec.attributes)
    tf.TF_OpDefinitionBuilderAddAttr(builder, attribute.c_str());
  for (const char* attribute : {"handle: int", "key: string", "op: int = 0", "root: int = 0"}) {
    tf.TF_OpDefinitionBuilderAddAttr(builder, attribute);
  }
  tf.TF_OpDefinitionBuilderSetIsStateful(builder, true);
  tf.TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, spec.shapes);
  tf.TF_RegisterOpDefinition(builder, status.get());  // owns the builder now
  if (!status.ok()) return tf.TF_Message(status.get());
  TF_KernelBuilder* kernel = tf.TF_NewKernelBuilder(spec.name, "CPU", create, spec.compute, destroy);
  tf.TF_RegisterKernelBuilder(spec.name, kernel, status.get());
  return status.ok() ? std::string() : tf.TF_Message(status.get());
}

std::string& problem() {
  static auto* text = new std::string;
  return *text;
}

// TensorFlow finds the ops a library registers while it is loaded, so this runs then.
__attribute__((constructor)) void register_ops() {
  problem() = load_tf_api();
  const std::string one_type = std::string("T: ") + kTypes;
  const std::string types = std::string("T: list(") + kTypes + ") >= 1";
  const OpSpec specs[] = {
      {"TfringAllReduce",
       {"active: bool", "tensors: N * T"},
       {"results: N * T"},
       {one_type, "N: int >= 1"},
       same_shapes<2>,
       all_reduce},
      {"TfringAllGatherRows",
       {"num_rows: int64", "tensors: T"},
       {"results: T", "rows: int64"},
       {types},
       unknown_shapes,
       all_gather_rows},
      {"TfringReduceScatter", {"tensor: T"}, {"result: T"}, {one_type}, unknown_shapes, reduce_scatter},
      {"TfringBroadcast", {"tensors: T"}, {"results: T"}, {types}, same_shapes<1>, broadcast},
      {"TfringBarrier", {}, {}, {}, unknown_shapes, barrier},
  };
  for (const OpSpec& spec : specs) {
    if (problem().empty()) problem() = register_op(spec);
  }
}

}  // namespace
}  // namespace tfring

// What kept the ops from being registered; empty if nothing did.
extern "C" TFRING_API const char* tfring_ops_problem(void) { return tfring::problem().c_str(); }
