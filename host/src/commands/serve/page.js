/* The page of `llm-rs serve`: follows the run, and talks to the model. */
"use strict";
const find = (id) => document.getElementById(id);
const make = (kind, text, name) => {
  const element = document.createElement(kind);
  element.textContent = text;
  if (name) element.className = name;
  return element;
};
const fromAddress = new URLSearchParams(location.hash.slice(1)).get("token");
if (fromAddress) {
  sessionStorage.setItem("token", fromAddress);
  history.replaceState(null, "", location.pathname);
}
const headers = () => {
  const token = sessionStorage.getItem("token");
  return token ? { Authorization: "Bearer " + token } : {};
};

/* Calls `each` with the name and the data of every server-sent event of a response. */
const readEvents = async (response, each) => {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      let [name, data] = ["message", ""];
      for (const line of part.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        if (line.startsWith("data: ")) data += line.slice(6);
      }
      if (data) each(name, data);
    }
  }
};

const list = (into, pairs) => into.replaceChildren(...pairs.map(([name, value]) => {
  const row = document.createElement("div");
  row.append(make("dt", name), make("dd", value));
  return row;
}));
const gib = ([used, total]) => `${(used / 2 ** 30).toFixed(1)} of ${(total / 2 ** 30).toFixed(1)} GiB`;

let status = {};
/* The server renders the figures, for wide and narrow screens, and escapes all texts in them. */
let figures = [];
const narrow = matchMedia("(max-width: 640px)");
const showFigure = () => {
  const chosen = figures[narrow.matches ? 1 : 0];
  if (!chosen) return;
  const figure = find("figure");
  const parsed = new DOMParser().parseFromString(chosen.svg, "image/svg+xml").documentElement;
  figure.replaceChildren(document.importNode(parsed, true));
  showValues(figure, chosen.panels);
};
narrow.addEventListener("change", showFigure);
const showRun = (run) => {
  find("run").hidden = false;
  find("run-error").hidden = !run.error;
  find("run-error").textContent = run.error || "";
  if (run.error) return;
  list(find("cells"), run.cells.filter(([, value]) => value !== "–"));
  figures = run.figures;
  showFigure();
  find("samples").hidden = run.samples.length === 0;
  find("sample-list").replaceChildren(...run.samples.flatMap((sample) => [
    make("p", `after ${sample.step} steps`), make("pre", sample.text)]));
};
const showStatus = (newer) => {
  status = newer;
  document.title = find("name").textContent = status.name;
  const model = status.model;
  const rows = [["texts in progress", `${model.active} of ${model.slots}`], ["waiting requests", String(status.queued)],
    ["generation", `${model.tokens_per_second.toFixed(1)} tokens/s`]];
  if (status.memory) rows.push(["memory", gib(status.memory)]);
  if (status.gpu_memory) rows.push(["GPU memory", gib(status.gpu_memory)]);
  if (status.gpu) rows.push(["GPU", status.gpu.replace(/^GPU /, "")]);
  list(find("machine"), rows);
  const kind = model.chat === false ? "no chat template: it continues the text" : "";
  find("model").textContent = model.error || (model.loaded ? [model.loaded, kind].filter(Boolean).join("; ")
    : "The model is loaded for the first message.");
};

const follow = async () => {
  for (;;) {
    try {
      const response = await fetch("events", { headers: headers() });
      find("login").hidden = response.status !== 401;
      if (response.status === 401) {
        find("connection").textContent = "a token is required";
        return;
      }
      if (!response.ok) throw new Error((await response.json()).error.message);
      find("connection").textContent = "connected";
      await readEvents(response, (name, data) => (name === "run" ? showRun : showStatus)(JSON.parse(data)));
      find("connection").textContent = "disconnected";
    } catch (error) {
      find("connection").textContent = `disconnected: ${error.message}`;
    }
    await new Promise((wake) => setTimeout(wake, 2000));
  }
};
find("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", find("token").value);
  find("token").value = "";
  follow();
});

/* The conversation: messages for a chat template; without one, the text that the model continues. Clear begins another one. */
let conversation = { messages: [], text: "" };
let request = null;
const say = (content, kind) => {
  const element = make("p", content, "message " + kind);
  find("messages").append(element);
  element.scrollIntoView({ block: "nearest" });
  return element;
};
const settings = () => {
  const values = {};
  for (const name of ["max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"]) {
    if (find(name).value !== "") values[name] = Number(find(name).value);
  }
  return values;
};
const setBusy = (busy) => {
  find("send").disabled = busy;
  find("stop").disabled = !busy;
};
/* Asks for an answer. Before the model is loaded, whether it has a template is unknown: then a refused chat becomes a text. */
const answer = async (talk, chat, output) => {
  const body = { ...settings(), stream: true };
  if (chat) {
    body.messages = talk.messages;
  } else {
    body.prompt = talk.text;
    /* Leaves room for the answer when the text is longer than the context. */
    if (status.model?.context) body.truncate_prompt_tokens = Math.ceil(status.model.context / 2);
  }
  const response = await fetch(chat ? "v1/chat/completions" : "v1/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify(body),
    signal: request.signal,
  });
  if (!response.ok) {
    const { error } = await response.json();
    if (chat && error.param === "messages" && status.model?.chat !== true) return answer(talk, false, output);
    throw new Error(error.message + (error.code === "context_length_exceeded" ? ", or begin again with Clear" : ""));
  }
  let [received, reason] = ["", null];
  try {
    await readEvents(response, (_, data) => {
      if (data === "[DONE]") return;
      const part = JSON.parse(data);
      if (part.error) throw new Error(part.error.message);
      const choice = part.choices[0];
      const more = (chat ? choice?.delta.content : choice?.text) || "";
      received += more;
      output.textContent += more;
      reason = choice?.stop_reason || reason;
      output.scrollIntoView({ block: "end" });
    });
    if (reason === "context_full") {
      const context = status.model?.context;
      const advice = chat ? " Clear begins a new conversation." : "";
      say(`The context${context ? ` of ${context} tokens` : ""} is full, so the answer ends here.${advice}`, "note");
    } else if (received.trim() === "") {
      say("The answer has no visible text.", "note");
    }
  } finally {
    talk.messages.push({ role: "assistant", content: received });
    talk.text += received;
  }
};
const ask = async () => {
  const content = find("prompt").value;
  if (request || content === "") return;
  request = new AbortController();
  setBusy(true);
  say(content, "user");
  find("prompt").value = "";
  const [talk, before] = [conversation, { messages: conversation.messages.slice(), text: conversation.text }];
  talk.messages.push({ role: "user", content });
  talk.text += content;
  const output = say("", "model");
  try {
    await answer(talk, status.model?.chat !== false, output);
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, "error");
    /* A message without any answer is not part of the conversation. */
    if (output.textContent === "") {
      output.remove();
      Object.assign(talk, before);
    }
  } finally {
    request = null;
    setBusy(false);
  }
};
find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
find("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") request?.abort();
});
find("stop").addEventListener("click", () => request?.abort());
find("clear").addEventListener("click", () => {
  request?.abort();
  conversation = { messages: [], text: "" };
  find("messages").replaceChildren();
  find("prompt").focus();
});
follow();
