// ONNX Runtime as a side of the kernel benchmarks.
//
// Speaks the protocol of kernel_sides.cc on stdin and stdout, for the side
// "onnxruntime". Every cell is a graph that repeats the operation on one input
// so often that what a call from JavaScript costs is no part of it; its answer
// is the shape of the last result, so that nothing is copied out, and
// the runtime keeps the memory of the results from call to call.
//
//   node onnxruntime_kernels.mjs MODULES --threads 2

import {createRequire} from 'node:module';
import path from 'node:path';
import readline from 'node:readline';

const [modules, flag, threadCount = '1'] = process.argv.slice(2);
if (!modules || (flag !== undefined && flag !== '--threads')) {
  console.error('usage: onnxruntime_kernels.mjs MODULES [--threads N]');
  process.exit(1);
}
const ort = createRequire(path.resolve(modules) + '/')('onnxruntime-node');

const COLUMNS = 4096;
// Bytes of float32 that one call of the graph works on, at least.
const CALL_BYTES = 16 << 20;

// Element types of onnx.TensorProto.
const FLOAT = 1, INT8 = 3, INT64 = 7, FLOAT16 = 10, FLOAT8E4M3FN = 17,
      INT4 = 22;

// Protobuf: a field as bytes.
function varint(value) {
  const bytes = [];
  for (let v = BigInt.asUintN(64, BigInt(value)); ; v >>= 7n) {
    if (v < 128n) return Buffer.from([...bytes, Number(v)]);
    bytes.push(Number(v & 127n) | 128);
  }
}

function field(number, value) {
  if (typeof value === 'number') {
    return Buffer.concat([varint(number << 3), varint(value)]);
  }
  const bytes = Buffer.from(value);
  return Buffer.concat(
      [varint(number << 3 | 2), varint(bytes.length), bytes]);
}

const message = (...fields) => Buffer.concat(fields);

function valueInfo(name, type, shape) {
  const dims = shape.map(d => field(1, field(1, d)));
  const tensor = message(field(1, type), field(2, message(...dims)));
  return message(field(1, name), field(2, field(1, tensor)));
}

function initializer(name, type, shape, bytes) {
  return message(...shape.map(d => field(1, d)), field(2, type),
                 field(8, name), field(9, bytes));
}

function node(type, inputs, outputs, attributes = {}) {
  const INT = 2;
  return message(
      ...inputs.map(i => field(1, i)), ...outputs.map(o => field(2, o)),
      field(4, type),
      ...Object.entries(attributes).map(
          ([name, i]) => field(
              5, message(field(1, name), field(3, i), field(20, INT)))));
}

const bytesOf = array =>
    Buffer.from(array.buffer, array.byteOffset, array.byteLength);

// Half precision, for scales and data of moderate size: the bits.
function half(x) {
  const bits = new Uint32Array(new Float32Array([x]).buffer)[0];
  const sign = bits >>> 16 & 0x8000;
  const exponent = (bits >>> 23 & 255) - 112;
  return exponent <= 0 ? sign
                       : sign | exponent << 10 | bits >>> 13 & 0x3ff;
}

// [count] elements as an array of that type: N(0, 1), each by way of `convert`.
function normal(count, ArrayType, convert) {
  const period = new ArrayType(Math.min(count, 1 << 20));
  // Any fixed sequence will do: a linear congruential generator.
  let state = 1;
  const uniform = () =>
      ((state = (Math.imul(state, 1664525) + 1013904223) >>> 0) + 1) / 2 ** 32;
  for (let i = 0; i < period.length; ++i) {
    period[i] = convert(
        Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform()));
  }
  const all = new ArrayType(count);
  for (let i = 0; i < count; i += period.length) {
    all.set(period.subarray(0, Math.min(period.length, count - i)), i);
  }
  return all;
}

// {input, nodes(i), initializers}: `nodes(i)` are those of the i-th repetition,
// whose result is called `y<i>`. Undefined where the runtime has no operation.
function graphOf(cell, rows) {
  const {operation, format, type} = cell;
  const block = cell.block_size;
  const initializers = [];
  const scales = (shape, attributes = {}) => {
    const count = shape.reduce((a, b) => a * b, 1);
    const base = cell.scale;
    initializers.push(
        type === 'float16'
            ? initializer('scale', FLOAT16, shape,
                          bytesOf(new Uint16Array(count).fill(half(base))))
            : initializer('scale', FLOAT, shape,
                          bytesOf(new Float32Array(count).fill(base))));
    initializers.push(
        format === 'int4'
            ? initializer('zero', INT4, shape,
                          Buffer.alloc(Math.ceil(count / 2)))
            : initializer('zero', INT8, shape,
                          Buffer.alloc(count, cell.zero_point)));
    return attributes;
  };
  let attributes;
  if (!block.length) {
    attributes = scales([]);
  } else if (block[0] === 1 && block[1] === 0) {
    attributes = scales([rows], {axis: 0});
  } else if (block[0] === 0 && block[1] === 1) {
    attributes = scales([COLUMNS], {axis: 1});
  } else {
    attributes = scales([rows, COLUMNS / block[1]],
                        {axis: 1, block_size: block[1]});
  }
  const quantize = (i, out) =>
      node('QuantizeLinear', ['x', 'scale', 'zero'], [out + i], attributes);
  if (operation === 'quantize' && format === 'float8_e4m3fn') {
    return {
      input: FLOAT,
      initializers: [],
      nodes: i => [node('Cast', ['x'], ['y' + i],
                        {to: FLOAT8E4M3FN, saturate: 1})]
    };
  }
  if (operation === 'quantize' && (format === 'int8' || format === 'int4')) {
    return {
      input: type === 'float16' ? FLOAT16 : FLOAT,
      initializers,
      nodes: i => [quantize(i, 'y')]
    };
  }
  if (operation === 'dequantize' && format === 'int8') {
    return {
      input: INT8,
      initializers,
      nodes: i => [node('DequantizeLinear', ['x', 'scale', 'zero'], ['y' + i],
                        attributes)]
    };
  }
  if (operation === 'evaluate' && format === 'int8' && type === 'float32') {
    return {
      input: FLOAT,
      initializers,
      nodes: i => [
        quantize(i, 'q'),
        node('DequantizeLinear', ['q' + i, 'scale', 'zero'], ['d' + i],
             attributes),
        node('Sub', ['d' + i, 'x'], ['e' + i]),
        node('ReduceSumSquare', ['e' + i], ['noise' + i], {keepdims: 0}),
        node('ReduceSumSquare', ['x'], ['signal' + i], {keepdims: 0}),
        node('Abs', ['e' + i], ['a' + i]),
        node('ReduceMax', ['a' + i], ['max' + i], {keepdims: 0}),
        node('Sum', ['noise' + i, 'signal' + i, 'max' + i], ['y' + i])
      ]
    };
  }
  return undefined;
}

async function makeBody(cell) {
  const count = cell.bytes / 4;
  const rows = count / COLUMNS;
  const parts = cell.type === 'bfloat16' ? undefined : graphOf(cell, rows);
  if (!parts) return undefined;
  const repeats = Math.max(1, Math.floor(CALL_BYTES / cell.bytes));
  const nodes = [];
  for (let i = 0; i < repeats; ++i) nodes.push(...parts.nodes(i));
  nodes.push(node('Shape', ['x'], ['shape']));
  const graph = message(
      ...nodes.map(n => field(1, n)), field(2, 'bench'),
      ...parts.initializers.map(i => field(5, i)),
      field(11, valueInfo('x', parts.input, [rows, COLUMNS])),
      field(12, valueInfo('shape', INT64, [2])));
  const model = message(field(1, 10), field(7, graph),
                        field(8, message(field(1, ''), field(2, 21))));
  const session = await ort.InferenceSession.create(model, {
    intraOpNumThreads: Number(threadCount),
    interOpNumThreads: 1,
    // Otherwise repetitions are recognised and done once.
    graphOptimizationLevel: 'disabled',
    logSeverityLevel: 3,
  });
  const shape = [rows, COLUMNS];
  let x;
  if (parts.input === INT8) {
    const code = v => Math.max(-128, Math.min(127, v / cell.scale));
    x = new ort.Tensor('int8', normal(count, Int8Array, code), shape);
  } else if (parts.input === FLOAT16) {
    x = new ort.Tensor('float16', normal(count, Uint16Array, half), shape);
  } else {
    x = new ort.Tensor('float32', normal(count, Float32Array, v => v), shape);
  }
  return {
    bytes: count * (parts.input === FLOAT16 ? 2 : 4) * repeats,
    run: () => session.run({x}),
    release: () => session.release(),
  };
}

let key, body;
for await (const line of readline.createInterface({input: process.stdin})) {
  const {side, seconds, ...cell} = JSON.parse(line);
  if (JSON.stringify(cell) !== key) {
    key = JSON.stringify(cell);
    if (body) await body.release();
    body = await makeBody(cell);
  }
  let answer = {};
  if (body) {
    // Long calls warm up once, in the round that asks for no time.
    if (cell.bytes < 64 << 20 || !seconds) await body.run();
    const begin = process.hrtime.bigint();
    let calls = 0, elapsed;
    do {
      await body.run();
      ++calls;
      elapsed = Number(process.hrtime.bigint() - begin) * 1e-9;
    } while (elapsed < seconds);
    answer = {gb_per_s: body.bytes * calls / elapsed * 1e-9};
  }
  console.log(JSON.stringify(answer));
}
