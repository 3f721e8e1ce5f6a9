// The ring's collectives as TensorFlow ops, on TensorFlow's C API.
//
// Every op takes the communicator's token, a resource that is never read: TensorFlow's automatic control
// dependencies then run the collectives of one communicator in program order. Ops with gradients also take
// the `done` of the previous one, and the gradient's collective takes the `done` of the call it belongs to
// (order.py). Kernels are synchronous: the done callback of the C API's asynchronous kernels must not be kept
// after the call, and a collective waits for peers only, never for another op.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "adam_ops.h"
#include "border.h"
#include "exchange_ops.h"
#include "invocation.h"
#include "record_ops.h"
#include "tensor.h"

namespace tfring {
namespace {

constexpr char kTypes[] =
    "{float, double, half, bfloat16, int8, int16, int32, int64, uint8, uint16, uint32, uint64, complex64, "
    "complex128, bool}";

// The tensors from input kFirst, each with an output of its shape. Input 1 before them is `active`.
template <Kind kKind, int kFirst>
void in_place(void* state, TF_OpKernelContext* context) {
  Invocation invocation(*static_cast<Attributes*>(state), context);
  if (kFirst > 1) invocation.read_active(1);
  const InPlaceTensors tensors(&invocation, kFirst);
  if (!invocation.ok()) return;
  const int code = invocation.run(kKind, tensors.data(), tensors.count());
  invocation.finish(code);
  if (kKind != Kind::kReduce || code != TFRING_OK) return;
  if (tfring_rank(invocation.handle()) == invocation.call().root) return;
  for (int t = 0; t < tensors.count(); ++t) {  // zeros except at the root
    std::memset(tensors.data()[t].output, 0, static_cast<size_t>(num_bytes(tensors.data()[t])));
  }
}

// This rank's share of each tensor's rows, in outputs of that shape.
void reduce_scatter(void* state, TF_OpKernelContext* context) {
  Invocation invocation(*static_cast<Attributes*>(state), context);
  const int world_size = tfring_world_size(invocation.handle());
  if (world_size < 0) return invocation.fail(kTfInvalidArgument, "this communicator is closed");
  const size_t count = static_cast<size_t>(invocation.num_inputs() - 1);  // after token
  std::vector<tfring_tensor> tensors(count);
  std::vector<std::vector<int64_t>> dims(count);  // the tensors point to these
  for (size_t i = 0; i < count; ++i) {
    const TF_Tensor* input = invocation.input(static_cast<int>(i) + 1);
    if (!invocation.ok()) return;
    for (int d = 0; d < tf.TF_NumDims(input); ++d) dims[i].push_back(tf.TF_Dim(input, d));
    std::vector<int64_t> out_dims = dims[i];
    if (!out_dims.empty()) {
      int64_t begin = 0;
      int64_t end = 0;
      tfring_chunk(out_dims[0], world_size, tfring_rank(invocation.handle()), &begin, &end);
      out_dims[0] = end - begin;
    }
    void* output = invocation.allocate(static_cast<int>(i), tf.TF_TensorType(input), out_dims);
    if (!invocation.ok()) return;
    tensors[i] = {tf.TF_TensorData(input), output, dims[i].data(), static_cast<int32_t>(dims[i].size()),
                  tf.TF_TensorType(input)};
  }
  invocation.finish(invocation.run(Kind::kReduceScatter, tensors.data(), static_cast<int>(count)));
}

void barrier(void* state, TF_OpKernelContext* context) {
  Invocation invocation(*static_cast<Attributes*>(state), context);
  invocation.check(invocation.run(Kind::kBarrier, nullptr, 0));
}

// Copies rows of an array with elements in two tensors, one after the other: `head`, which may end anywhere
// in a row, and `body`. A row has the shape of a row of `like`.
void gather_rows(void* state, TF_OpKernelContext* context) {
  Invocation invocation(*static_cast<Attributes*>(state), context);
  const TF_Tensor* head = invocation.input(0);
  const TF_Tensor* body = invocation.input(1);
  const TF_Tensor* indices = invocation.input(3);
  TfDataType dtype = 0;
  std::vector<int64_t> dims = invocation.input_dims(2, &dtype);
  if (!invocation.ok()) return;
  const size_t count = tf.TF_TensorByteSize(indices) / sizeof(int64_t);
  size_t row = static_cast<size_t>(size_of(static_cast<DType>(dtype)));
  for (size_t d = 1; d < dims.size(); ++d) row *= static_cast<size_t>(dims[d]);
  const size_t head_bytes = tf.TF_TensorByteSize(head);
  const size_t bytes = head_bytes + tf.TF_TensorByteSize(body);
  if (dims.empty() || row == 0 || bytes % row != 0) {
    return invocation.fail(kTfInvalidArgument,
                           "the elements of `head` and `body` do not make up full rows of `like`");
  }
  const uint64_t num_rows = bytes / row;
  dims[0] = static_cast<int64_t>(count);
  char* to = static_cast<char*>(invocation.allocate(0, dtype, dims));
  if (!invocation.ok()) return;
  const char* first = static_cast<const char*>(tf.TF_TensorData(head));
  const char* second = static_cast<const char*>(tf.TF_TensorData(body));
  const auto* numbers = static_cast<const int64_t*>(tf.TF_TensorData(indices));
  for (size_t i = 0; i < count; ++i, to += row) {
    if (static_cast<uint64_t>(numbers[i]) >= num_rows) {
      return invocation.fail(kTfInvalidArgument, "index " + std::to_string(numbers[i]) +
                                                     " is not from 0 to " + std::to_string(num_rows - 1) +
                                                     ", the last row");
    }
    const size_t begin = static_cast<size_t>(numbers[i]) * row;
    const size_t in_head = begin < head_bytes ? std::min(row, head_bytes - begin) : 0;
    if (in_head > 0) std::memcpy(to, first + begin, in_head);
    if (in_head < row) std::memcpy(to + in_head, second + (begin + in_head - head_bytes), row - in_head);
  }
}

void mark(void* state, TF_OpKernelContext*) { tfring_mark(static_cast<Attributes*>(state)->key.c_str()); }

// Represents the origin of `tensor` in the order of gradients. Has no gradient itself.
void slot_after(void* state, TF_OpKernelContext* context) {
  Invocation invocation(*static_cast<Attributes*>(state), context);
  invocation.finish(TFRING_OK);
}

void send(void* state, TF_OpKernelContext* context) {
  Invocation invocation(*static_cast<Attributes*>(state), context);
  const TF_Tensor* input = invocation.input(1);  // after token
  if (!invocation.ok()) return;
  std::vector<int64_t> dims;
  for (int d = 0; d < tf.TF_NumDims(input); ++d) dims.push_back(tf.TF_Dim(input, d));
  auto* receipt = static_cast<float*>(invocation.allocate(0, static_cast<TfDataType>(DType::kFloat32), {}));
  if (!invocation.ok()) return;
  *receipt = 0;
  const tfring_tensor tensor{tf.TF_TensorData(input), nullptr, dims.data(), static_cast<int32_t>(dims.size()),
                             tf.TF_TensorType(input)};
  invocation.finish(invocation.run(Kind::kSend, &tensor, 1));
}

void receive(void* state, TF_OpKernelContext* context) {
  const Attributes& attributes = *static_cast<Attributes*>(state);
  Invocation invocation(attributes, context);
  struct Output {
    Invocation* invocation;
    TfDataType dtype;
  } output{&invocation, static_cast<TfDataType>(attributes.which)};
  const auto allocate = [](void* to, const int64_t* dims, int32_t num_dims, void** outputs, int32_t* placed) {
    const Output& self = *static_cast<Output*>(to);
    outputs[0] = self.invocation->allocate(0, self.dtype, std::vector<int64_t>(dims, dims + num_dims));
    if (self.invocation->ok()) *placed = 1;
  };
  const tfring_tensor tensor{nullptr, nullptr, nullptr, 0, output.dtype};
  invocation.finish(invocation.run(Kind::kReceive, &tensor, 1, nullptr, allocate, &output));
}

template <bool kHasGradient>
void* create(TF_OpKernelConstruction* construction) {
  ScopedStatus status;
  auto* attributes = new Attributes;
  attributes->has_gradient = kHasGradient;
  int32_t list_size = 0;
  int32_t length = 0;
  tf.TF_OpKernelConstruction_GetAttrInt64(construction, "handle", &attributes->handle, status.get());
  if (status.ok()) tf.TF_OpKernelConstruction_GetAttrInt64(construction, "op", &attributes->op, status.get());
  if (status.ok())
    tf.TF_OpKernelConstruction_GetAttrInt64(construction, "root", &attributes->root, status.get());
  if (status.ok())
    tf.TF_OpKernelConstruction_GetAttrInt64(construction, "which", &attributes->which, status.get());
  if (status.ok())
    tf.TF_OpKernelConstruction_GetAttrInt64(construction, "compression", &attributes->compression,
                                            status.get());
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

// Output i has the shape of input kFirst + i, except for the last ones: kLast inputs, and one output if there
// are such inputs, with a shape that ops.py knows.
template <int kFirst, int kLast = kNumOrdering>
void same_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  if (kLast > 0) tf.TF_ShapeInferenceContextSetUnknownShape(context, status);
  const int count = static_cast<int>(tf.TF_ShapeInferenceContextNumInputs(context)) - kFirst - kLast;
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

// The border of a kernel: no exception passes it.
template <void (*kCompute)(void*, TF_OpKernelContext*)>
void at_kernel(void* state, TF_OpKernelContext* context) {
  guard([&] { kCompute(state, context); },
        [&](const char* what) {
          ScopedStatus status;
          tf.TF_SetStatus(status.get(), kTfInternal, what);
          tf.TF_OpKernelContext_Failure(context, status.get());
        });
}

struct OpSpec {
  const char* name;
  std::vector<std::string> inputs;
  std::vector<std::string> outputs;
  std::vector<std::string> attributes;
  void (*shapes)(TF_ShapeInferenceContext*, TF_Status*);
  void (*compute)(void*, TF_OpKernelContext*);
  bool has_gradient = true;
  bool has_token = true;
  bool is_stateful = true;
};

std::string register_op(const OpSpec& spec) {
  ScopedStatus status;
  TF_OpDefinitionBuilder* builder = tf.TF_NewOpDefinitionBuilder(spec.name);
  if (spec.has_token) tf.TF_OpDefinitionBuilderAddInput(builder, "token: resource");
  for (const std::string& input : spec.inputs) tf.TF_OpDefinitionBuilderAddInput(builder, input.c_str());
  for (const std::string& output : spec.outputs) tf.TF_OpDefinitionBuilderAddOutput(builder, output.c_str());
  if (spec.has_gradient) {
    tf.TF_OpDefinitionBuilderAddInput(builder, "before: float");
    tf.TF_OpDefinitionBuilderAddInput(builder, "of: float");
    tf.TF_OpDefinitionBuilderAddOutput(builder, "done: float");
  }
  for (const std::string& attribute : spec.attributes)
    tf.TF_OpDefinitionBuilderAddAttr(builder, attribute.c_str());
  for (const char* attribute : {"handle: int", "key: string", "op: int = 0", "root: int = 0",
                                "which: int = 0", "compression: int = 0"}) {
    tf.TF_OpDefinitionBuilderAddAttr(builder, attribute);
  }
  tf.TF_OpDefinitionBuilderSetIsStateful(builder, spec.is_stateful);
  tf.TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, spec.shapes);
  tf.TF_RegisterOpDefinition(builder, status.get());  // owns the builder now
  if (!status.ok()) return tf.TF_Message(status.get());
  TF_KernelBuilder* kernel = tf.TF_NewKernelBuilder(
      spec.name, "CPU", spec.has_gradient ? create<true> : create<false>, spec.compute, destroy);
  tf.TF_RegisterKernelBuilder(spec.name, kernel, status.get());
  return status.ok() ? std::string() : tf.TF_Message(status.get());
}

std::string& problem() {
  static auto* text = new std::string;
  return *text;
}

// Runs when the library is loaded, because TensorFlow finds the ops that a library registers then.
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
       at_kernel<in_place<Kind::kAllReduce, 2>>},
      {"TfringAllGatherRows",
       {"tensors: T"},
       {"results: T", "rows: int64"},
       {types},
       unknown_shapes,
       at_kernel<all_gather_rows>},
      {"TfringAllReduceRows",
       {"active: bool", "values: T", "indices: I"},
       {"sums: T", "ids: I", "rows: int64"},
       {types, "I: list({int32, int64}) >= 1"},
       unknown_shapes,
       at_kernel<all_reduce_rows>,
       false},
      {"TfringExchange",
       {"counts: int64", "tensors: T"},
       {"results: T", "rows: int64"},
       {types},
       unknown_shapes,
       at_kernel<exchange_rows>},
      {"TfringReduceScatter",
       {"tensors: N * T"},
       {"results: N * T"},
       {one_type, "N: int >= 1"},
       unknown_shapes,
       at_kernel<reduce_scatter>},
      {"TfringReduce",
       {"tensors: N * T"},
       {"results: N * T"},
       {one_type, "N: int >= 1"},
       same_shapes<1>,
       at_kernel<in_place<Kind::kReduce, 1>>},
      {"TfringSend", {"tensor: T"}, {"receipt: float"}, {one_type}, unknown_shapes, at_kernel<send>},
      {"TfringReceive", {"anchor: float"}, {"tensor: T"}, {one_type}, unknown_shapes, at_kernel<receive>},
      {"TfringBroadcast",
       {"tensors: T"},
       {"results: T"},
       {types},
       same_shapes<1>,
       at_kernel<in_place<Kind::kBroadcast, 1>>},
      {"TfringBarrier", {}, {}, {}, unknown_shapes, at_kernel<barrier>, false},
      {"TfringAdam",
       {"scalars: T", "gradient: T", "momentum: T", "velocity: T", "weight: T"},
       {"new_momentum: T", "new_velocity: T", "new_weight: T"},
       {"T: {float, double}"},
       same_shapes<3, 0>,
       at_kernel<adam>,
       false},
      {"TfringAdamRows",
       {"scalars: T", "rows: T", "ids: I", "momentum: T", "velocity: T", "weight: T"},
       {"new_momentum: T", "new_velocity: T", "new_weight: T"},
       {"T: {float, double}", "I: {int32, int64}"},
       same_shapes<4, 0>,
       at_kernel<adam_rows>,
       false},
      {"TfringGatherRows",
       {"head: T", "body: T", "like: T", "indices: int64"},
       {"rows: T"},
       {one_type},
       unknown_shapes,
       at_kernel<gather_rows>,
       false,
       false,
       false},
      {"TfringIndexRecords",
       {"path: string"},
       {"index: int64"},
       {},
       unknown_shapes,
       at_kernel<index_records>,
       false,
       false},
      {"TfringReadRecords",
       {"paths: string", "sizes: int64", "places: int64"},
       {"records: string"},
       {},
       unknown_shapes,
       at_kernel<read_records>,
       false,
       false,
       false},
      {"TfringMark", {}, {}, {}, unknown_shapes, at_kernel<mark>, false},
      {"TfringCallSlot",
       {"tensor: T"},
       {"done: float"},
       {one_type},
       unknown_shapes,
       at_kernel<slot_after>,
       false},
      {"TfringFindCancellation", {}, {}, {}, unknown_shapes, at_kernel<find_cancellation>, false, false},
  };
  for (const OpSpec& spec : specs) {
    if (problem().empty()) problem() = register_op(spec);
  }
}

}  // namespace
}  // namespace tfring

// Returns the error that prevented the registration of the ops; empty if there is none.
extern "C" TFRING_API const char* tfring_ops_problem(void) { return tfring::problem().c_str(); }
