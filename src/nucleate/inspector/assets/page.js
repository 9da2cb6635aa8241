// The entry of the page of a server.
import {HttpApi, parseJson} from "./api.js";
import {fromHash} from "./code.js";
import {h, svg} from "./dom.js";
import {mount} from "./inspector.js";
import {svgText} from "./picture.js";

const icon = svg("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: "0 0 16 16" },
  [[1, 14], [6, 9], [11, 4]].map(([x, height]) => svg("rect", { x, y: 15 - height, width: 4, height, rx: 1, fill: x === 6 ? "#ea8656" : "#1f5fbf" })));
document.head.append(h("link", { rel: "icon", href: URL.createObjectURL(new Blob([svgText(icon)], { type: "image/svg+xml" })) }));

mount(document.getElementById("nci-root"), new HttpApi("inspector/"), { ...fromHash(location.hash, parseJson), shareable: true });
