// Elements without a compile step: html`<b>${x}</b>`.
import htm from "htm";
import { h } from "preact";

export const html = htm.bind(h);
