/**
 * Tensors on the wire: safetensors, the same bytes that are saved to a file.
 *
 *   8 bytes: length of the header (little-endian)   header: JSON   raw little-endian numbers
 */

const KINDS = {
  F64: Float64Array,
  F32: Float32Array,
  I64: BigInt64Array,
  I32: Int32Array,
  I16: Int16Array,
  I8: Int8Array,
  U32: Uint32Array,
  U16: Uint16Array,
  U8: Uint8Array,
  BOOL: Uint8Array,
};

/** @typedef {{shape: number[], data: ArrayLike<number>, dtype: string}} Tensor */

/**
 * Read a safetensors file.
 * @param {ArrayBuffer} buffer
 * @returns {{tensors: Record<string, Tensor>, metadata: Record<string, string>}}
 */
export function parse(buffer) {
  if (buffer.byteLength < 8) throw new Error(`${buffer.byteLength} bytes are no safetensors file`);
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  if (length > buffer.byteLength - 8) throw new Error(`a header of ${length} bytes does not fit the file`);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const tensors = {};
  for (const [name, entry] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const [start, end] = entry.data_offsets;
    const bytes = buffer.slice(8 + length + start, 8 + length + end); // a copy is aligned, the file is not
    tensors[name] = { shape: entry.shape, dtype: entry.dtype, data: read(bytes, entry.dtype) };
  }
  return { tensors, metadata: header.__metadata__ ?? {} };
}

/** The numbers behind bytes of a dtype; half precision is widened exactly. */
function read(bytes, dtype) {
  if (dtype === "BF16" || dtype === "F16") {
    const halves = new Uint16Array(bytes);
    return Float32Array.from(halves, dtype === "BF16" ? fromBfloat16 : fromFloat16);
  }
  const kind = KINDS[dtype];
  if (!kind) throw new Error(`tensors of ${dtype} cannot be read here`);
  const numbers = new kind(bytes);
  return dtype === "I64" ? Float64Array.from(numbers, Number) : numbers;
}

const bits = new DataView(new ArrayBuffer(4));

function fromBfloat16(half) {
  bits.setUint32(0, half << 16);
  return bits.getFloat32(0);
}

function fromFloat16(half) {
  const sign = half & 0x8000 ? -1 : 1;
  const exponent = (half >> 10) & 31;
  const fraction = half & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** @param {string} text base64 @returns {ArrayBuffer} */
export function fromBase64(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i += 1) bytes[i] = binary.charCodeAt(i);
  return bytes.buffer;
}

/** Row `i` of a tensor along its first axis (a view where the data is typed). */
export function row(tensor, ...indices) {
  let data = tensor.data;
  let shape = tensor.shape;
  for (const index of indices) {
    const size = shape.slice(1).reduce((a, b) => a * b, 1);
    data = data.subarray(index * size, (index + 1) * size);
    shape = shape.slice(1);
  }
  return { shape, data, dtype: tensor.dtype };
}
