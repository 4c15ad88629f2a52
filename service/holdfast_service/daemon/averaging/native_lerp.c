/* kept + weight * (brought - kept) for many F32, each rounded as torch's `lerp_` rounds it on a CPU: the difference in F32,
   product and sum as one operation. From a weight of 1/2 on it is computed from the other end. Reads and writes each element
   once, so it takes as long as a copy.
 */

#include <immintrin.h>
#include <stddef.h>

/* Whether this processor has what the function below is made of. */
int holdfast_lerp_here(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

/* `into` is neither of the others. */
__attribute__((target("avx2,fma"))) void
holdfast_lerp(const float *kept, const float *brought, float *into, size_t count, float weight)
{
    const int near = weight < 0.5f && weight > -0.5f;
    const float factor = near ? weight : -(1.0f - weight);
    const float *from = near ? kept : brought;
    const __m256 factors = _mm256_set1_ps(factor);
    size_t at = 0;

    for (; at + 8 <= count; at += 8) {
        __m256 difference = _mm256_sub_ps(_mm256_loadu_ps(brought + at), _mm256_loadu_ps(kept + at));
        _mm256_storeu_ps(into + at, _mm256_fmadd_ps(difference, factors, _mm256_loadu_ps(from + at)));
    }
    for (; at < count; at++)
        into[at] = __builtin_fmaf(brought[at] - kept[at], factor, from[at]);
}
