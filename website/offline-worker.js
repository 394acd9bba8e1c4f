// Browsers start no worker from a page that was opened from a disk. There, this stands in for Worker: it runs the
// worker's script in a hidden frame, and passes messages between the frame and the page. The search needs no more.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      // What the script calls, as in a worker.
      this.scope.postMessage = (data) => this.deliver(data);
      this.scope.importScripts = (...urls) => Promise.all(urls.map((each) => this.load(each)));
      this.load(new URL(url, document.baseURI).href).then(() => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((data) => this.pass(data));
      });
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.pass(data);
    }

    terminate() {
      this.scope.frameElement.remove();
    }

    load(url) {
      const script = this.scope.document.createElement("script");
      script.src = url;
      return new Promise((done, failed) => {
        script.onload = done;
        script.onerror = failed;
        this.scope.document.body.append(script);
      });
    }

    pass(data) {
      const message = new this.scope.MessageEvent("message", { data });
      if (this.scope.onmessage) this.scope.onmessage(message);
      this.scope.dispatchEvent(message);
    }

    deliver(data) {
      const message = new MessageEvent("message", { data });
      if (this.onmessage) this.onmessage(message);
      this.dispatchEvent(message);
    }
  };
}
