// Workers for pages that are opened from a disk, where browsers allow none: the search runs in a hidden frame instead.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow.document;
      inside.open();
      inside.write(`<body><script>
        postMessage = message => parent.postMessage(message, "*");
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise(done => {
          const script = document.createElement("script");
          script.src = url; script.onload = done; document.body.appendChild(script);
        })), Promise.resolve());
      </script><script src="${url}"></script></body>`);
      inside.close();
      this.ready = new Promise(done => this.frame.contentWindow.onload = done);
      addEventListener("message", event => {
        if (event.source !== this.frame.contentWindow) return;
        this.dispatchEvent(new MessageEvent("message", {data: event.data}));
        if (this.onmessage) this.onmessage(event);
      });
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data: structuredClone(data)})));
    }
    terminate() { this.frame.remove(); }
  };
