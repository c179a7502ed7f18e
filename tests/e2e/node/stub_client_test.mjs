// A stranger's Node client: proto/ loaded at run time, nothing of ours.
//
//   node stub_client_test.mjs QUANTD_BINARY NODE_MODULES_PARENT
//
// Exits with 77 (skipped) when @grpc/grpc-js was not installed there.

import assert from 'node:assert/strict';
import {spawn} from 'node:child_process';
import {existsSync, mkdtempSync, readFileSync, rmSync} from 'node:fs';
import {createRequire} from 'node:module';
import {tmpdir} from 'node:os';
import {join} from 'node:path';
import {setTimeout as sleep} from 'node:timers/promises';
import {fileURLToPath} from 'node:url';

const [binary, modulesParent] = process.argv.slice(2);
const require = createRequire(join(modulesParent, 'package.json'));
let grpc, protoLoader;
try {
  grpc = require('@grpc/grpc-js');
  protoLoader = require('@grpc/proto-loader');
} catch (error) {
  console.log(`skipped: ${error.message.split('\n')[0]}`);
  process.exit(77);
}

// Only what hangs takes so long, however busy the machine is.
const PATIENCE_MS = 240_000;
const protoDir = fileURLToPath(new URL('../../../proto', import.meta.url));
const v1 = grpc.loadPackageDefinition(protoLoader.loadSync(
    ['quantd/v1/quantization_service.proto',
     'quantd/v1/encoding_service.proto'],
    {includeDirs: [protoDir], longs: String, enums: String, defaults: false,
     oneofs: true})).quantd.v1;

const deadline = () => ({deadline: Date.now() + PATIENCE_MS});

async function startServer(folder) {
  const ready = join(folder, 'ready.json');
  rmSync(ready, {force: true});
  const child = spawn(binary, [
    '--listen', '127.0.0.1:0', '--metrics-listen', 'off',
    '--store', `sqlite:${join(folder, 'store.db')}`, '--ready-file', ready,
  ], {stdio: ['ignore', 'ignore', 'inherit']});
  const ended = new Promise((resolve) => child.once('exit', resolve));
  const until = Date.now() + PATIENCE_MS;
  while (!existsSync(ready)) {
    assert.equal(child.exitCode, null, 'quantd ended at start');
    assert.ok(Date.now() < until, 'quantd did not get ready');
    await sleep(10);
  }
  return {child, ended, address: JSON.parse(readFileSync(ready)).grpc[0]};
}

const description = (values, shape, tensor = 't') => ({
  name: {model: 'acme/net', tensor},
  elementType: 'ELEMENT_TYPE_FLOAT32',
  shape: shape ?? [values.length],
});

const bytesOf = (typed) =>
    Buffer.from(typed.buffer, typed.byteOffset, typed.byteLength);

// Messages of one tensor; the header rides with the first chunk.
function messages(header, data, chunkBytes = 1 << 20) {
  const parts = [{header, data: data.subarray(0, chunkBytes)}];
  for (let at = chunkBytes; at < data.length; at += chunkBytes) {
    parts.push({offset: at, data: data.subarray(at, at + chunkBytes)});
  }
  return parts;
}

// Sends messages on one stream; one {header, data, summary, error} a tensor.
function stream(client, rpc, requests) {
  return new Promise((resolve, reject) => {
    const call = client[rpc](new grpc.Metadata(), deadline());
    const answers = [];
    let header, chunks = [];
    call.on('data', (response) => {
      header = response.header ?? header;
      if (response.data?.length) chunks.push(response.data);
      if (response.summary || response.error) {
        answers.push({header, data: Buffer.concat(chunks),
                      summary: response.summary, error: response.error});
        header = undefined;
        chunks = [];
      }
    });
    call.on('error', reject);
    call.on('end', () => resolve(answers));
    for (const request of requests) call.write(request);
    call.end();
  });
}

const unary = (client, rpc, request) => new Promise((resolve, reject) => {
  client[rpc](request, deadline(), (error, answer) =>
      error ? reject(error) : resolve(answer));
});

// All messages of a call that answers with a stream.
const download = async (client, rpc, request) => {
  const messages = [];
  for await (const message of client[rpc](request, deadline())) {
    messages.push(message);
  }
  return messages;
};

const code = (name) => grpc.status[name];

// Ties to even, which Math.round is not.
function rint(x) {
  const floor = Math.floor(x);
  const part = x - floor;
  if (part !== 0.5) return part < 0.5 ? floor : floor + 1;
  return floor % 2 === 0 ? floor : floor + 1;
}

const quantizeInt8 = (values, scale) => Int8Array.from(
    values, (x) => Math.max(-127, Math.min(127, rint(Math.fround(x / scale)))));

function testValues(count) {
  let state = 12345;
  return Float32Array.from({length: count}, () => {
    state = (Math.imul(state, 1103515245) + 12345) >>> 0;
    return state / 2 ** 31 - 1;
  });
}

const int8Spec = {format: 'NUMBER_FORMAT_INT8'};
const values = testValues(5000);
const scale = Math.fround(
    values.reduce((m, x) => Math.max(m, Math.abs(x)), 0) / 127);

const tests = {
  async QuantizesInChunksLikeTheFormula({quantization}) {
    for (const chunkBytes of [4, 1000, 1 << 20]) {
      const [{header, data, summary}] = await stream(
          quantization, 'Quantize',
          messages({tensor: description(values), spec: int8Spec},
                   bytesOf(values), chunkBytes));
      assert.deepEqual(header.encoding.scale, [scale]);
      assert.equal(header.sizeBytes, '5000');
      assert.equal(summary.count, '5000');
      assert.ok(data.equals(bytesOf(quantizeInt8(values, scale))));
    }
  },

  async DequantizesBack({quantization}) {
    const codes = quantizeInt8(values, scale);
    const [{data, summary}] = await stream(
        quantization, 'Dequantize',
        messages({tensor: description(values),
                  encoding: {...int8Spec, scale: [scale]}},
                 bytesOf(codes), 777));
    const want = Float32Array.from(codes, (q) => Math.fround(q * scale));
    assert.ok(data.equals(bytesOf(want)));
    assert.equal(summary.count, '5000');
  },

  async CalibratesStoresAndQuantizesByReference({quantization, encodings}) {
    const tensor = description(values, undefined, 'stored');
    const [{summary}] = await stream(
        quantization, 'Calibrate',
        messages({tensor, spec: int8Spec}, bytesOf(values), 4096));
    assert.equal(summary.statistics.count, '5000');
    const {etag} = summary.storedEncoding;
    const got = await unary(encodings, 'GetEncoding', {name: tensor.name});
    assert.equal(got.storedEncoding.etag, etag);
    assert.deepEqual(got.storedEncoding.encoding.scale, [scale]);
    const [{header, data}] = await stream(
        quantization, 'Quantize',
        messages({tensor, reference: {etag}}, bytesOf(values)));
    assert.equal(header.etag, etag);
    assert.ok(data.equals(bytesOf(quantizeInt8(values, scale))));
  },

  async EvaluatesCandidatesSideBySide({quantization}) {
    const [{summary}] = await stream(
        quantization, 'Evaluate',
        messages({tensor: description(values), candidates: [
          {label: 'int8', spec: int8Spec},
          {label: 'int4', spec: {format: 'NUMBER_FORMAT_INT4',
                                 blockSize: [32]}},
        ]}, bytesOf(values), 600));
    let signal = 0, noise = 0;
    quantizeInt8(values, scale).forEach((q, i) => {
      signal += values[i] ** 2;
      noise += (Math.fround(q * scale) - values[i]) ** 2;
    });
    const [int8, int4] = summary.candidates;
    assert.deepEqual([int8.label, int4.label], ['int8', 'int4']);
    assert.ok(Math.abs(int8.overall.sqnrDb -
                       10 * Math.log10(signal / noise)) < 1e-6);
    assert.ok(int4.overall.sqnrDb < int8.overall.sqnrDb);
  },

  async ComparesTwoTensors({quantization}) {
    const pairs = Float32Array.from(
        {length: 2 * values.length},
        (_, i) => values[i >> 1] + (i % 2) * 0.25);
    const [{summary}] = await stream(
        quantization, 'Evaluate',
        messages({tensor: description(values), comparison: true},
                 bytesOf(pairs), 1600));
    let noise = 0;
    values.forEach((x, i) => noise += (pairs[2 * i + 1] - x) ** 2);
    assert.equal(summary.comparison.count, '5000');
    assert.ok(Math.abs(summary.comparison.sumSquaredError / noise - 1) < 1e-9);
  },

  async ContributesComputesAndSweeps({quantization, encodings}) {
    const model = 'acme/contribute';
    const tensor = {...description(values), name: {model, tensor: 'w'}};
    const contribution = (sequence) =>
        messages({tensor, contribution: {source: 'rank-0', sequence}},
                 bytesOf(values), 3000);
    const answers = await stream(
        quantization, 'Calibrate',
        [...contribution(1), ...contribution(2), ...contribution(2)]);
    assert.deepEqual(answers.map(({summary}) => summary.contribution.sequence),
                     ['1', '2', '2']);
    assert.deepEqual(
        answers.map(({summary}) => summary.contribution.duplicate ?? false),
        [false, false, true]);

    const got = await unary(encodings, 'GetStatistics', {name: tensor.name});
    assert.equal(got.statistics.count, '10000');
    assert.deepEqual(got.sources.map(({source, sequence}) =>
        [source, sequence]), [['rank-0', '2']]);

    const [computed] = await download(
        encodings, 'ComputeEncodings', {model, defaultSpec: int8Spec});
    assert.deepEqual(computed.storedEncoding.encoding.scale, [scale]);
    const {storedEncoding} = await unary(encodings, 'GetEncoding',
                                         {name: tensor.name});
    assert.equal(storedEncoding.etag, computed.storedEncoding.etag);

    const [swept, last] = await download(encodings, 'Sweep', {
      model,
      specs: [{format: 'NUMBER_FORMAT_INT4'}, int8Spec],
      maxSizeBytes: 6000,
    });
    assert.deepEqual(swept.candidates.map((c) => c.specIndex ?? 0), [1, 0]);
    assert.ok(last.summary.mixture.targetMet);
    assert.equal(last.summary.mixture.choices[0].specIndex, 1);
  },

  async AnErrorEndsItsTensorAndNotTheStream({quantization}) {
    const good = {tensor: description(values), spec: int8Spec};
    const bad = {tensor: description(values),
                 encoding: {...int8Spec, scale: [1, 2]}};
    const answers = await stream(quantization, 'Quantize', [
      ...messages(good, bytesOf(values), 3000),
      ...messages(bad, bytesOf(values), 3000),
      ...messages(good, bytesOf(values), 3000),
    ]);
    assert.deepEqual(answers.map(({error}) => error?.reason),
                     [undefined, 'SCALE_COUNT', undefined]);
    assert.ok(answers[0].data.equals(answers[2].data));
  },

  async AChunkWithoutATensorEndsTheStream({quantization}) {
    await assert.rejects(
        stream(quantization, 'Quantize', [{data: Buffer.alloc(4)}]),
        (error) => error.code === code('INVALID_ARGUMENT') &&
            error.details.includes('HEADER_MISSING'));
  },

  async PutsGetsListsAndDeletesEncodings({encodings}) {
    const name = {model: 'acme/put-get', revision: 'v1', tensor: 'w'};
    const encoding = {...int8Spec, scale: [0.5], zeroPoint: [3]};
    const put = await unary(encodings, 'PutEncoding',
                            {name, encoding, ifMatch: 'absent'});
    await assert.rejects(
        unary(encodings, 'PutEncoding', {name, encoding, ifMatch: 'absent'}),
        (error) => error.code === code('FAILED_PRECONDITION'));
    const got = await unary(encodings, 'GetEncoding', {name});
    assert.deepEqual(got.storedEncoding.encoding.scale, [0.5]);
    assert.deepEqual(got.storedEncoding.encoding.zeroPoint, [3]);
    const list = await unary(encodings, 'ListEncodings',
                             {model: name.model, revision: name.revision});
    assert.deepEqual(list.encodings.map((stored) => stored.name.tensor),
                     ['w']);
    await unary(encodings, 'DeleteEncoding',
                {name, ifMatch: put.storedEncoding.etag});
    await assert.rejects(unary(encodings, 'GetEncoding', {name}),
                         (error) => error.code === code('NOT_FOUND'));
  },
};

const folder = mkdtempSync(join(tmpdir(), 'quantd-node-'));
process.on('exit', () => rmSync(folder, {recursive: true, force: true}));
const {child, ended, address} = await startServer(folder);
let failed = 0;
try {
  const options = {'grpc.enable_http_proxy': 0};
  const credentials = grpc.credentials.createInsecure();
  const clients = {
    quantization: new v1.QuantizationService(address, credentials, options),
    encodings: new v1.EncodingService(address, credentials, options),
  };
  for (const [name, test] of Object.entries(tests)) {
    try {
      await test(clients);
      console.log(`ok      ${name}`);
    } catch (error) {
      failed++;
      console.log(`FAILED  ${name}\n${error.stack}`);
    }
  }
  for (const client of Object.values(clients)) client.close();
} finally {
  child.kill('SIGTERM');
  const exitCode = await ended;
  if (exitCode !== 0) {
    failed++;
    console.log(`FAILED  quantd ended with ${exitCode}`);
  }
}
process.exitCode = failed === 0 ? 0 : 1;
