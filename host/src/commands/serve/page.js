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
  if (model.first_token_ms !== null) rows.push(["first token", `${model.first_token_ms.toPrecision(3)} ms`]);
  if (model.token_ms !== null) rows.push(["next tokens", `${model.token_ms.toPrecision(3)} ms each`]);
  if (status.memory) rows.push(["memory", gib(status.memory)]);
  if (status.gpu_memory) rows.push(["GPU memory", gib(status.gpu_memory)]);
  if (status.gpu) rows.push(["GPU", status.gpu.replace(/^GPU /, "")]);
  list(find("machine"), rows);
  find("model").textContent = model.error || model.loaded || "The model is loaded for the first message.";
  find("base").hidden = model.chat !== false;
  find("instructions").hidden = model.chat === false;
  for (const [name, value] of Object.entries(model.sampling ?? {})) find(name).placeholder = String(value);
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

/* Conversations, in the browser's storage for this address. A conversation has a title, the system prompt and messages of the roles `user` and
   `assistant`. A model without a chat template continues the text of all messages. */
const STORED = "llm-rs conversation ";
const newTalk = () => ({ id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", system: "", messages: [], changed: 0 });
const storedTalks = () => {
  const talks = [];
  for (let i = 0; i < localStorage.length; i += 1) {
    const key = localStorage.key(i);
    if (!key.startsWith(STORED)) continue;
    try {
      const { title, system, messages, changed } = JSON.parse(localStorage.getItem(key));
      const valid = Array.isArray(messages) && messages.every(({ role, content }) =>
        ["user", "assistant"].includes(role) && typeof content === "string");
      if (valid) talks.push({ id: key.slice(STORED.length), title: String(title), system: String(system), messages, changed: Number(changed) });
    } catch {
      /* Another program wrote it. */
    }
  }
  return talks.sort((a, b) => b.changed - a.changed);
};
/* A page that is loaded again shows the same conversation. */
let talk = storedTalks().find(({ id }) => id === sessionStorage.getItem("conversation")) ?? newTalk();
/* The request in progress, and the element of its answer. */
let request = null;
const titleOf = ({ title, messages }) => title || (messages[0]?.content.trim().slice(0, 60) || "New conversation");
const store = () => {
  if (talk.messages.length === 0 && !localStorage.getItem(STORED + talk.id)) return;
  talk.changed = Date.now();
  try {
    const { title, system, messages, changed } = talk;
    localStorage.setItem(STORED + talk.id, JSON.stringify({ title, system, messages, changed }));
  } catch (error) {
    note(`The browser cannot store the conversation: ${error.message}. Delete others, or export it.`, "error");
  }
  showTalks();
};
const showTalks = () => {
  const talks = storedTalks();
  if (!talks.some(({ id }) => id === talk.id)) talks.unshift(talk);
  find("talks").replaceChildren(...talks.map((other) => {
    const option = make("option", titleOf(other));
    option.value = other.id;
    option.selected = other.id === talk.id;
    return option;
  }));
  find("rename").value = talk.title;
  sessionStorage.setItem("conversation", talk.id);
};

const note = (content, kind) => {
  const shown = make("p", content, "message " + kind);
  find("messages").append(shown);
  shown.scrollIntoView({ block: "nearest" });
};
const action = (name, run) => {
  const button = make("button", name);
  button.type = "button";
  button.addEventListener("click", run);
  return button;
};
/* Shows text of a role: an answer as Markdown, a message or the text of a model without a template as it is. */
const showText = (into, role, content) => {
  if (role === "assistant" && status.model?.chat !== false) showMarkdown(into, content);
  else into.textContent = content;
};
const showMessage = ({ role, content }, i) => {
  const isUser = role === "user";
  const body = make("div", "", "text");
  showText(body, role, content);
  const shown = make("article", "", "message " + (isUser ? "user" : "model"));
  shown.setAttribute("aria-label", isUser ? "You" : "Model");
  const actions = make("div", "", "actions");
  if (isUser) actions.append(action("Edit", () => edit(shown, i)));
  else actions.append(action("Copy", () => copyText(talk.messages[i].content)), action("Regenerate", () => regenerate(i)));
  shown.append(body, actions);
  find("messages").append(shown);
  return body;
};
const showTalk = () => {
  find("messages").replaceChildren();
  talk.messages.forEach(showMessage);
  find("system").value = talk.system;
  find("messages").scrollTop = find("messages").scrollHeight;
  showTalks();
};
const openTalk = (other) => {
  request?.abort();
  talk = other;
  showTalk();
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
  find("messages").classList.toggle("busy", busy);
  find("messages").setAttribute("aria-busy", String(busy));
};
/* Asks for an answer to the messages of a conversation, and calls `take` with each part. Returns why it ended. Before the model is loaded,
   whether it has a template is unknown: then a refused chat becomes a text. */
const complete = async ({ system, messages }, chat, signal, take) => {
  const body = { ...settings(), stream: true };
  if (chat) {
    body.messages = [...(system ? [{ role: "system", content: system }] : []), ...messages];
  } else {
    body.prompt = messages.map(({ content }) => content).join("");
    /* Leaves room for the answer when the text is longer than the context. */
    if (status.model?.context) body.truncate_prompt_tokens = Math.ceil(status.model.context / 2);
  }
  const response = await fetch(chat ? "v1/chat/completions" : "v1/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) {
    const { error } = await response.json();
    if (chat && error.param === "messages" && status.model?.chat !== true) return complete({ messages }, false, signal, take);
    throw new Error(error.message + (error.code === "context_length_exceeded" ? ", edit an earlier message, or begin a new conversation" : ""));
  }
  let reason = null;
  await readEvents(response, (_, data) => {
    if (data === "[DONE]") return;
    const part = JSON.parse(data);
    if (part.error) throw new Error(part.error.message);
    const choice = part.choices[0];
    take((chat ? choice?.delta.content : choice?.text) || "");
    reason = choice?.stop_reason || reason;
  });
  return reason;
};
/* Answers the last message of the conversation. */
const answer = async () => {
  const own = talk;
  const running = new AbortController();
  request = running;
  setBusy(true);
  let received = "";
  const chat = status.model?.chat !== false;
  const output = showMessage({ role: "assistant", content: "" }, own.messages.length);
  const log = find("messages");
  /* At most once for each frame. A reader who has scrolled up stays there. */
  let due = false;
  const show = () => {
    due = false;
    const follows = log.scrollTop + log.clientHeight > log.scrollHeight - 60;
    showText(output, "assistant", received);
    if (follows) log.scrollTop = log.scrollHeight;
  };
  log.scrollTop = log.scrollHeight;
  let [reason, failure] = [null, null];
  try {
    reason = await complete(own, chat, running.signal, (more) => {
      received += more;
      if (!due) requestAnimationFrame(show);
      due = true;
    });
  } catch (error) {
    if (error.name !== "AbortError") failure = error.message;
  }
  request = null;
  setBusy(false);
  const isShown = own === talk;
  if (received === "" && (failure || running.signal.aborted)) {
    /* A message without any answer is not part of the conversation. It can be sent again. */
    const { content } = own.messages.pop();
    if (isShown) {
      showTalk();
      if (find("prompt").value === "") find("prompt").value = content;
    }
  } else {
    own.messages.push({ role: "assistant", content: received });
    if (isShown) show();
  }
  if (isShown) store();
  if (!isShown) return;
  if (failure) {
    note(failure, "error");
  } else if (reason === "context_full") {
    const context = status.model?.context;
    const advice = chat ? " Edit an earlier message, or begin a new conversation." : "";
    note(`The context${context ? ` of ${context} tokens` : ""} is full, so the answer ends here.${advice}`, "note");
  } else if (received.trim() === "" && !running.signal.aborted) {
    note("The answer has no visible text.", "note");
  }
};
/* Replaces the messages from `i` on by another one of the user, and answers it. */
const send = (content, i = talk.messages.length) => {
  if (request || content === "") return;
  talk.messages.length = i;
  talk.messages.push({ role: "user", content });
  showTalk();
  store();
  answer();
};
const regenerate = (i) => {
  if (request) return;
  talk.messages.length = i;
  showTalk();
  answer();
};
const edit = (shown, i) => {
  if (request) return;
  const field = document.createElement("textarea");
  field.value = talk.messages[i].content;
  field.rows = 3;
  field.setAttribute("aria-label", "Message");
  const form = document.createElement("form");
  form.className = "edit";
  const later = talk.messages.length - i - 1;
  const replaced = later > 0 ? `Sending replaces the ${later === 1 ? "later message" : `${later} later messages`}.` : "";
  form.append(field, make("p", replaced), make("button", "Send"), action("Cancel", showTalk));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(field.value, i);
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") showTalk();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send(field.value, i);
    }
  });
  shown.replaceChildren(form);
  field.focus();
};

const ask = () => {
  const content = find("prompt").value;
  if (request || content === "") return;
  find("prompt").value = "";
  send(content);
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
find("new").addEventListener("click", () => {
  openTalk(newTalk());
  find("prompt").focus();
});
find("talks").addEventListener("change", () => {
  const chosen = find("talks").value;
  openTalk(storedTalks().find(({ id }) => id === chosen) ?? talk);
});
find("rename").addEventListener("change", () => {
  talk.title = find("rename").value.trim().slice(0, 100);
  store();
});
find("system").addEventListener("change", () => {
  talk.system = find("system").value;
  store();
});
find("delete").addEventListener("click", () => {
  if (!confirm(`Delete the conversation “${titleOf(talk)}”?`)) return;
  localStorage.removeItem(STORED + talk.id);
  openTalk(storedTalks()[0] ?? newTalk());
});
find("export").addEventListener("click", () => {
  const { system, messages } = talk;
  const all = [...(system ? [{ role: "system", content: system }] : []), ...messages];
  const url = URL.createObjectURL(new Blob([JSON.stringify({ messages: all }) + "\n"], { type: "application/json" }));
  const anchor = document.createElement("a");
  anchor.href = url;
  anchor.download = `${titleOf(talk).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation"}.json`;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
});
showTalk();
follow();
