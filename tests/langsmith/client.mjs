// What the client for JavaScript does, as its users would write it. Ends with a sentence, or with what was wrong.

import assert from "node:assert/strict";
import * as sandbox from "langsmith/sandbox";

const client = new sandbox.SandboxClient();

const wrong = new sandbox.SandboxClient({
  apiEndpoint: `${process.env.LANGSMITH_ENDPOINT}/v2/sandboxes`,
  apiKey: "wrong",
});
await assert.rejects(wrong.listSandboxes(), sandbox.LangSmithSandboxAuthenticationError);

const sb = await client.createSandbox({ name: "from-javascript%1é" });
try {
  assert.equal(sb.status, "ready");
  const result = await sb.run("echo out; echo err >&2; exit 3");
  assert.deepEqual([result.stdout, result.stderr, result.exit_code], ["out\n", "err\n", 3]);

  await sb.write("/app/text ü.txt", "ünïcode");
  assert.equal(new TextDecoder().decode(await sb.read("/app/text ü.txt")), "ünïcode");
  const bytes = new Uint8Array(300_000).map((_, at) => at % 256);
  await sb.write("/app/bytes", bytes);
  assert.deepEqual(new Uint8Array(await sb.read("/app/bytes")), bytes);
  await assert.rejects(sb.read("/no/such/file"), sandbox.LangSmithResourceNotFoundError);

  const handle = await sb.run("for i in 1 2 3; do echo $i; sleep 0.05; done", { wait: false });
  let text = "";
  for await (const chunk of handle) text += chunk.data;
  assert.equal(text, "1\n2\n3\n");
  assert.equal((await handle.result).exit_code, 0);

  const again = await (await sb.reconnect(handle.commandId, { stdoutOffset: 2 })).result;
  assert.equal(again.stdout, "2\n3\n");

  const killed = await sb.run("echo up; sleep 300", { wait: false, timeout: 0 });
  for await (const chunk of killed) {
    assert.equal(chunk.data, "up\n");
    killed.kill();
  }
  assert.notEqual((await killed.result).exit_code, 0);

  await assert.rejects(sb.run("sleep 300", { timeout: 1 }), sandbox.LangSmithCommandTimeoutError);
  const large = await sb.run("head -c 3000000 /dev/zero | tr '\\0' x");
  assert.equal(large.stdout.length, 3_000_000);

  const names = (await client.listSandboxes()).map((box) => box.name);
  assert.ok(names.includes("from-javascript%1é"));
  const snapshot = await client.captureSnapshot(sb.name, "from-javascript");
  const copy = await client.createSandbox(snapshot.id);
  assert.equal(new TextDecoder().decode(await copy.read("/app/text ü.txt")), "ünïcode");
  await copy.delete();
  await client.deleteSnapshot(snapshot.id);
} finally {
  await client.deleteSandbox("from-javascript%1é");
}
await assert.rejects(client.getSandbox("from-javascript%1é"), sandbox.LangSmithResourceNotFoundError);
console.log("all is well");
process.exit(0);
