// Anthropic's Node client.
import assert from "node:assert/strict";
import { test } from "node:test";

import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";

const { HEADRACE_URL, HEADRACE_KEY, HEADRACE_MODEL: model } = process.env;
const client = new Anthropic({ baseURL: HEADRACE_URL, apiKey: HEADRACE_KEY, maxRetries: 0 });

const messages = [{ role: "user", content: "What is the capital of France?" }];
const Weather = z.object({ city: z.enum(["Rome", "Paris"]), days: z.number().int() });

test("a message, and its stream", async () => {
    const request = { model, messages, max_tokens: 24, temperature: 0 };
    const whole = await client.messages.create(request);
    const stream = client.messages.stream(request);
    let text = "";
    stream.on("text", (delta) => {
        text += delta;
    });
    assert.deepEqual((await stream.finalMessage()).content, whole.content);
    assert.equal(text, whole.content[0].text);
    assert.match(text, /Paris/);
});

test("a tool", async () => {
    const tools = [{ name: "weather", input_schema: z.toJSONSchema(Weather) }];
    const asked = [{ role: "user", content: "Is it sunny in Rome?" }];
    const choice = { type: "tool", name: "weather", disable_parallel_tool_use: true };
    const message = await client.messages.stream({ model, messages: asked, max_tokens: 100, tools, tool_choice: choice }).finalMessage();
    assert.equal(message.stop_reason, "tool_use");
    Weather.parse(message.content[0].input);
});

test("a typed answer", async () => {
    const format = zodOutputFormat(Weather);
    const answer = await client.messages.parse({ model, messages, max_tokens: 100, output_config: { format } });
    Weather.parse(answer.parsed_output);
});
