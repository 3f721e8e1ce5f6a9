// The part of TensorFlow's C API that the ops use, declared by hand and looked up when the library is loaded.
//
// TensorFlow is not needed to build, and one binary works with every release whose libraries have these
// symbols. The declarations follow tensorflow/c/{kernels,ops,tf_tensor,tf_tstring,tf_status}.h, which
// TensorFlow keeps stable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

struct TF_Status;
struct TF_Tensor;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_KernelBuilder;
struct TF_OpDefinitionBuilder;
struct TF_ShapeInferenceContext;
struct TF_ShapeHandle;

// An element of a string tensor.
struct alignas(8) TF_TString {
  char bytes[24];
};

namespace tfring {

// Values of TF_Code.
enum TfCode {
  kTfOk = 0,
  kTfCancelled = 1,
  kTfInvalidArgument = 3,
  kTfDeadlineExceeded = 4,
  kTfNotFound = 5,
  kTfAborted = 10,
  kTfInternal = 13,
  kTfDataLoss = 15,
};

// Values of TF_DataType in addition to those of DType.
using TfDataType = int;
constexpr TfDataType kTfString = 7;

// clang-format off
#define TFRING_TF_SYMBOLS(X)                                                                                         \
  X(TF_Status*, TF_NewStatus, ())                                                                                    \
  X(void, TF_DeleteStatus, (TF_Status*))                                                                             \
  X(void, TF_SetStatus, (TF_Status*, int code, const char* message))                                                 \
  X(int, TF_GetCode, (const TF_Status*))                                                                             \
  X(const char*, TF_Message, (const TF_Status*))                                                                     \
  X(void, TF_SetPayload, (TF_Status*, const char* key, const char* value))                                           \
  X(void, TF_DeleteTensor, (TF_Tensor*))                                                                             \
  X(TfDataType, TF_TensorType, (const TF_Tensor*))                                                                   \
  X(int, TF_NumDims, (const TF_Tensor*))                                                                             \
  X(int64_t, TF_Dim, (const TF_Tensor*, int index))                                                                  \
  X(size_t, TF_TensorByteSize, (const TF_Tensor*))                                                                   \
  X(void*, TF_TensorData, (const TF_Tensor*))                                                                        \
  X(void, TF_StringCopy, (TF_TString*, const char* from, size_t length))                                             \
  X(const char*, TF_StringGetDataPointer, (const TF_TString*))                                                       \
  X(size_t, TF_StringGetSize, (const TF_TString*))                                                                   \
  X(TF_OpDefinitionBuilder*, TF_NewOpDefinitionBuilder, (const char* op_name))                                       \
  X(void, TF_OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder*, const char* spec))                                \
  X(void, TF_OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder*, const char* spec))                               \
  X(void, TF_OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder*, const char* spec))                              \
  X(void, TF_OpDefinitionBuilderSetIsStateful, (TF_OpDefinitionBuilder*, bool))                                      \
  X(void, TF_OpDefinitionBuilderSetShapeInferenceFunction,                                                           \
    (TF_OpDefinitionBuilder*, void (*)(TF_ShapeInferenceContext*, TF_Status*)))                                      \
  X(void, TF_RegisterOpDefinition, (TF_OpDefinitionBuilder*, TF_Status*))                                            \
  X(int64_t, TF_ShapeInferenceContextNumInputs, (TF_ShapeInferenceContext*))                                         \
  X(TF_ShapeHandle*, TF_NewShapeHandle, ())                                                                          \
  X(void, TF_DeleteShapeHandle, (TF_ShapeHandle*))                                                                   \
  X(void, TF_ShapeInferenceContextGetInput, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))           \
  X(void, TF_ShapeInferenceContextSetOutput, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))          \
  X(void, TF_ShapeInferenceContextSetUnknownShape, (TF_ShapeInferenceContext*, TF_Status*))                          \
  X(TF_KernelBuilder*, TF_NewKernelBuilder,                                                                          \
    (const char* op_name, const char* device, void* (*create)(TF_OpKernelConstruction*),                             \
     void (*compute)(void*, TF_OpKernelContext*), void (*destroy)(void*)))                                           \
  X(void, TF_RegisterKernelBuilder, (const char* name, TF_KernelBuilder*, TF_Status*))                               \
  X(void, TF_OpKernelConstruction_Failure, (TF_OpKernelConstruction*, TF_Status*))                                   \
  X(void, TF_OpKernelConstruction_GetAttrInt64,                                                                      \
    (TF_OpKernelConstruction*, const char* name, int64_t* value, TF_Status*))                                        \
  X(void, TF_OpKernelConstruction_GetAttrSize,                                                                       \
    (TF_OpKernelConstruction*, const char* name, int32_t* list_size, int32_t* total_size, TF_Status*))               \
  X(void, TF_OpKernelConstruction_GetAttrString,                                                                     \
    (TF_OpKernelConstruction*, const char* name, char* value, size_t max_length, TF_Status*))                        \
  X(int, TF_NumInputs, (TF_OpKernelContext*))                                                                        \
  X(int, TF_NumOutputs, (TF_OpKernelContext*))                                                                       \
  X(void, TF_GetInput, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*))                                          \
  X(TF_Tensor*, TF_AllocateOutput,                                                                                   \
    (TF_OpKernelContext*, int index, TfDataType, const int64_t* dims, int num_dims, size_t length, TF_Status*))      \
  X(TF_Tensor*, TF_ForwardInputOrAllocateOutput,                                                                     \
    (TF_OpKernelContext*, const int* candidates, int num_candidates, int index, const int64_t* dims, int num_dims,   \
     int* forwarded, TF_Status*))                                                                                    \
  X(void, TF_OpKernelContext_Failure, (TF_OpKernelContext*, TF_Status*))
// clang-format on

struct TfApi {
#define TFRING_DECLARE(result, name, arguments) result(*name) arguments;
  TFRING_TF_SYMBOLS(TFRING_DECLARE)
#undef TFRING_DECLARE
};

extern TfApi tf;

// Returns the address of a function of TensorFlow's C API; null if this TensorFlow does not have it.
void* find_tf_symbol(const char* name);

// Fills `tf` from the TensorFlow that this process has loaded. Returns an error text, empty if there is none.
std::string load_tf_api();

}  // namespace tfring
