// TensorFlow ops for TFRecord files: the positions of records, and records at given positions.
#pragma once

#include "tf_api.h"

namespace tfring {

// Finds all records of a file: the offset of each, its length, and the checksum of its data, which is not
// read.
void index_records(void* state, TF_OpKernelContext* context);

// Reads records of files at given positions and checks them.
void read_records(void* state, TF_OpKernelContext* context);

}  // namespace tfring
