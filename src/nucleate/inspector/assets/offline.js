// The entry of a saved page: shows the trace that is part of it, or offers to open one.
import {checkDocument, FileApi, parseJson} from "./api.js";
import {mount} from "./inspector.js";

const saved = parseJson(document.getElementById("nci-document").textContent);
const api = new FileApi(saved && checkDocument(saved));
mount(document.getElementById("nci-root"), api, { document: saved, shareable: false });
