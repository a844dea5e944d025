// Browsers refuse workers to pages opened from the file system. There a worker runs in a hidden frame instead: the same
// script, the same messages, on the page's own thread. Pages from a server keep real workers.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    #early = [];
    #scope = null;

    constructor(address) {
      super();
      const source = String(new URL(address, document.baseURI));
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html><title>worker</title>";
      frame.addEventListener("load", () => this.#start(frame.contentWindow, source), { once: true });
      document.body.append(frame);
      this.terminate = () => frame.remove();
    }

    #start(scope, source) {
      // In a worker these reach the page; in a frame they would reach the frame itself.
      scope.postMessage = (data) => queueMicrotask(() => this.#tell(data));
      scope.importScripts = (...addresses) => addresses.reduce((done, next) => done.then(() => load(scope, next)), Promise.resolve());
      load(scope, source).then(() => {
        this.#scope = scope;
        this.#early.splice(0).forEach((data) => this.postMessage(data));
      }, () => this.dispatchEvent(new Event("error")));
    }

    #tell(data) {
      const event = new MessageEvent("message", { data });
      this.onmessage?.(event);
      this.dispatchEvent(event);
    }

    postMessage(data) {
      if (this.#scope === null) this.#early.push(data);
      else this.#scope.dispatchEvent(new this.#scope.MessageEvent("message", { data: this.#scope.structuredClone(data) }));
    }
  };
  window.Worker = window.IFrameWorker;

  function load(scope, address) {
    return new Promise((resolve, reject) => {
      const script = scope.document.createElement("script");
      script.src = address;
      script.onload = resolve;
      script.onerror = reject;
      scope.document.head.append(script);
    });
  }
}
