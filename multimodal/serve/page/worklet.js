/** Gives 16-bit samples of one channel, a part at a time; after a message of its owner the rest, then null. */
class Samples extends AudioWorkletProcessor {
  constructor() {
    super();
    this.part = new Int16Array(1024);
    this.filled = 0;
    this.port.onmessage = () => {
      this.give();
      this.port.postMessage(null);
    };
  }

  give() {
    this.port.postMessage(this.part.slice(0, this.filled));
    this.filled = 0;
  }

  process([channels]) {
    for (let i = 0; i < (channels[0]?.length ?? 0); i++) {
      let sum = 0;
      for (const channel of channels) sum += channel[i];
      const value = Math.max(-1, Math.min(1, sum / channels.length));
      this.part[this.filled++] = Math.round(value * 32767);
      if (this.filled === this.part.length) this.give();
    }
    return true;
  }
}

registerProcessor("samples", Samples);
