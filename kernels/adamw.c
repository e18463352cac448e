// One step of AdamW over n parameters in the CPU's memory, in one pass: adamw.py has the formula, and builds this file.
// bfloat16 is the upper half of a float32; it is rounded to nearest, ties to even. `grad` may be `parameter` itself.

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bfloat16;

static inline float read_bfloat16(bfloat16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

static inline bfloat16 round_to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // a NaN's rounding would carry into -0
}

static inline float read_float(float x) { return x; }
static inline float round_to_float(float x) { return x; }

#define ADAMW(NAME, PARAMETER, GRAD)                                                                                   \
    void NAME(PARAMETER *parameter, const GRAD *grad, float *w, float *m, float *v, int64_t n, int threads,            \
              float scale, float lr, float m_correction, float sqrt_v_correction, float one_less_beta1,                \
              float one_less_beta2, float eps, float weight_decay) {                                                   \
        _Pragma("omp parallel for simd num_threads(threads) schedule(static)")                                         \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            float g = scale * read_##GRAD(grad[i]);                                                                    \
            float new_m = m[i] + one_less_beta1 * (g - m[i]);                                                          \
            float new_v = v[i] + one_less_beta2 * (g * g - v[i]);                                                      \
            float step = new_m * m_correction / (sqrtf(new_v) * sqrt_v_correction + eps) + weight_decay * w[i];        \
            float new_w = w[i] - lr * step;                                                                            \
            m[i] = new_m;                                                                                              \
            v[i] = new_v;                                                                                              \
            w[i] = new_w;                                                                                              \
            parameter[i] = round_to_##PARAMETER(new_w);                                                                \
        }                                                                                                              \
    }

ADAMW(adamw_bfloat16_bfloat16, bfloat16, bfloat16)
ADAMW(adamw_bfloat16_float, bfloat16, float)
ADAMW(adamw_float_float, float, float)
