// What TypeScript cannot know of the page: which element has which id, and what hangs on an element.

interface Document {
  getElementById(id: string): any;
}

interface ParentNode {
  querySelector(selectors: string): any;
  querySelectorAll(selectors: string): any;
}

interface EventTarget {
  [name: string]: any;
}
