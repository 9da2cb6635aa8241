// Block and record connections to other hosts than loopback, as ../offline/sitecustomize.py (node --import).

import { appendFileSync } from 'node:fs'
import net from 'node:net'

const connect = net.Socket.prototype.connect

net.Socket.prototype.connect = function (...given) {
  const options = Array.isArray(given[0]) ? given[0][0] : given[0]
  const host = options?.host ?? 'localhost'
  if (!['localhost', '127.0.0.1', '::1'].includes(host)) {
    appendFileSync(process.env.OFFLINE_LOG, `connect ${host}\n`)
    throw new Error(`no network here: ${host}`)
  }
  return connect.apply(this, given)
}
