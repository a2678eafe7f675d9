// OpenAI's Node client.
import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI, { NotFoundError } from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const { HEADRACE_URL, HEADRACE_KEY, HEADRACE_MODEL: model } = process.env;
const client = new OpenAI({ baseURL: `${HEADRACE_URL}/v1`, apiKey: HEADRACE_KEY, maxRetries: 0 });

const messages = [{ role: "user", content: "What is the capital of France?" }];
const asked = [{ role: "user", content: "Is it sunny in Rome?" }];
const described = [{ role: "user", content: "Describe Rome: its name, its country, and whether it is old." }];
const Weather = z.object({ city: z.enum(["Rome", "Paris"]), days: z.number().int() });
const Place = z.object({ name: z.string(), country: z.string(), old: z.boolean(), position: z.object({ coastal: z.boolean().nullable() }) });
const weather = { type: "function", name: "weather", parameters: z.toJSONSchema(Weather), strict: true };

test("models", async () => {
    assert.deepEqual((await client.models.list()).data.map(({ id }) => id), [model]);
});

test("a chat, and its stream", async () => {
    const request = { model, messages, temperature: 0, max_completion_tokens: 24 };
    const whole = await client.chat.completions.create(request);
    let text = "";
    let usage;
    for await (const chunk of await client.chat.completions.create({ ...request, stream: true, stream_options: { include_usage: true } })) {
        text += chunk.choices[0]?.delta.content ?? "";
        usage = chunk.usage;
    }
    assert.match(text, /Paris/);
    assert.equal(text, whole.choices[0].message.content);
    assert.deepEqual(usage, whole.usage);
});

test("a stream that is left early ends its request", async () => {
    const stream = await client.chat.completions.create({ model, messages, stream: true, ignore_eos: true, max_completion_tokens: 2000 });
    for await (const chunk of stream) {
        if (chunk.choices[0].delta.content) {
            break;
        }
    }
    assert.ok(stream.controller.signal.aborted);
});

test("a tool, streamed, and its result", async () => {
    const request = { model, tools: [zodFunction({ name: "weather", parameters: Weather })], temperature: 0, max_completion_tokens: 100 };
    const stream = client.chat.completions.stream({ ...request, messages: asked, tool_choice: "required", parallel_tool_calls: false });
    const { message } = (await stream.finalChatCompletion()).choices[0];
    assert.equal(message.tool_calls.length, 1);
    Weather.parse(message.tool_calls[0].function.parsed_arguments);
    const history = [...asked, message, { role: "tool", tool_call_id: message.tool_calls[0].id, content: "Sunny." }];
    const after = await client.chat.completions.create({ ...request, messages: history, tool_choice: "none" });
    assert.ok(after.choices[0].message.content);
});

test("a typed answer", async () => {
    const request = { model, messages: described, temperature: 0, max_completion_tokens: 200 };
    const answer = await client.chat.completions.parse({ ...request, response_format: zodResponseFormat(Place, "place") });
    Place.parse(answer.choices[0].message.parsed);
});

test("responses: whole, streamed, with a tool, typed", async () => {
    const request = { model, temperature: 0, max_output_tokens: 200 };
    const whole = await client.responses.create({ ...request, input: messages });
    const stream = client.responses.stream({ ...request, input: messages });
    let text = "";
    stream.on("response.output_text.delta", ({ delta }) => {
        text += delta;
    });
    assert.equal((await stream.finalResponse()).output_text, whole.output_text);
    assert.equal(text, whole.output_text);
    const called = await client.responses.create({ ...request, input: asked, tools: [weather], tool_choice: "required", parallel_tool_calls: false });
    Weather.parse(JSON.parse(called.output[0].arguments));
    const typed = await client.responses.parse({ ...request, input: described, text: { format: zodTextFormat(Place, "place") } });
    Place.parse(typed.output_parsed);
});

test("embeddings", async () => {
    const { data } = await client.embeddings.create({ model, input: ["A cat.", "A kitten."], dimensions: 64 });
    assert.deepEqual(data.map(({ embedding }) => embedding.length), [64, 64]);
});

test("errors", async () => {
    await assert.rejects(client.chat.completions.create({ model: "nope", messages }), (error) => {
        return error instanceof NotFoundError && error.code === "model_not_found" && error.param === "model";
    });
});
