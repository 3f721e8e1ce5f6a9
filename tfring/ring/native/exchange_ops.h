// The ops whose outputs' sizes are known only on the way.
#pragma once

#include "tf_api.h"

namespace tfring {

void all_gather_rows(void* state, TF_OpKernelContext* context);
// Values of tables, then their ids. Without a world (handle 0) of this process alone.
void all_reduce_rows(void* state, TF_OpKernelContext* context);
// all_to_all, gather or scatter, by the attribute `which`.
void exchange_rows(void* state, TF_OpKernelContext* context);

}  // namespace tfring
