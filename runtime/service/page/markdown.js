// Shows text while it arrives, with a small part of Markdown: paragraphs, code blocks, headings,
// inline code and bold. Whole lines become elements, the unfinished last line is text. Blocks have
// a limited size: a browser lays out again the one that gains text, and no other.

import { element } from "./dom.js";

const FENCE = /^\s*(```|~~~)\s*[\w+#.-]*\s*$/;
const INLINE = /(`+)(?=[^`])(.*?[^`])\1(?!`)|\*\*(?=\S)(.+?)(?<=\S)\*\*|^#{1,6} +(.+)$/g;
const MAX_CHARS = 4000; // of a block, and of a line

export class MarkdownWriter {
  #root;
  #block = null; // that the next line may join
  #size = 0; // characters in it
  #fence = null; // that ends the present code block
  #rest = ""; // the unfinished line
  #tail = element("span"); // shows it
  #pending = "";
  #frame = 0;

  constructor(root) {
    this.#root = root;
  }

  // Adds text, which is shown with the next frame.
  append(text) {
    this.#pending += text;
    this.#frame ||= requestAnimationFrame(() => this.#write());
  }

  // Shows all text; no more follows.
  finish() {
    cancelAnimationFrame(this.#frame);
    this.#pending += "\n";
    this.#write();
  }

  #write() {
    this.#frame = 0;
    const lines = (this.#rest + this.#pending).split("\n");
    this.#pending = "";
    this.#rest = lines.pop();
    this.#tail.remove();
    for (const line of lines) this.#line(line);
    for (; this.#rest.length > MAX_CHARS; this.#rest = this.#rest.slice(MAX_CHARS)) {
      this.#line(this.#rest.slice(0, MAX_CHARS));
    }
    this.#tail.textContent = this.#rest;
    (this.#block ?? this.#root).append(this.#tail);
  }

  #line(line) {
    const fence = FENCE.exec(line)?.[1];
    if (this.#fence ? fence === this.#fence : !fence && !line.trim()) {
      this.#fence = this.#block = null;
    } else if (fence && !this.#fence) {
      this.#fence = fence;
      const code = element("code");
      this.#root.append(element("pre", { tabIndex: 0 }, code));
      this.#open(code);
    } else {
      if (!this.#block) this.#open(this.#root);
      else if (this.#size > MAX_CHARS) this.#open(this.#block.parentNode);
      this.#block.append(...(this.#fence ? [line] : inline(line)), "\n");
      this.#size += line.length;
    }
  }

  #open(parent) {
    this.#block = element("div");
    this.#size = 0;
    parent.append(this.#block);
  }
}

function* inline(text) {
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    if (found.index > end) yield text.slice(end, found.index);
    yield found[1] ? element("code", {}, found[2]) : element("strong", {}, found[3] ?? found[4]);
    end = found.index + found[0].length;
  }
  if (end < text.length) yield text.slice(end);
}
