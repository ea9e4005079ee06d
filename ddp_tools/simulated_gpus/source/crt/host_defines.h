// The marks in CUDA's headers that mean nothing to the host's compiler; the wheels leave them out.
#pragma once
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __cluster_dims__(...)
#define __launch_bounds__(...)
#define __specialization_static static
#define __location__(place)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __attribute__((aligned(bytes)))
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDAAPI
