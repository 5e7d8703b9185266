// SPDX-License-Identifier: Apache-2.0

package ingress

import (
	"net/http"
	"strings"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// guard keeps out what must not reach the sandbox, whichever way it was routed.
func (in *ingress) guard(r *http.Request, to route) error {
	switch {
	case r.Method == http.MethodConnect:
		return reply.Errorf(wire.CodeGeneralMethodNotAllowed, "ingress is no forward proxy: CONNECT means nothing here.").
			WithHint("Send requests to the endpoint itself; WebSocket and other upgrades work there.")
	case to.port == egressPort:
		return reply.Errorf(wire.CodeIngressNoEgress, "This sandbox has no way out to the network.")
	case !in.loopback && to.port != execdPort:
		return reply.Errorf(wire.CodeIngressAccessRequired, "Port %d of the sandbox is not open to other machines.", to.port)
	case to.port == execdPort && fromOtherSite(r):
		return reply.Errorf(wire.CodeForeignOrigin, "A web page of another origin must not use a sandbox's API.").
			WithHint("Call it from a program, or through a server of your own.")
	}
	return nil
}

// fromOtherSite tells requests that a browser makes for a page of another origin: of any web site, or of a program in
// a sandbox. execd wants a token in a header, which such a page can neither know nor send without asking first (the
// preflight, an OPTIONS with an Origin, which is refused here as well); this holds even if a token leaks. Ports of
// programs are not guarded so: what Origin they accept is theirs to say, and they see it unchanged.
func fromOtherSite(r *http.Request) bool {
	for _, origin := range r.Header.Values("Origin") {
		scheme, host, ok := strings.Cut(origin, "://")
		if !ok || scheme != "http" && scheme != "https" || !strings.EqualFold(host, r.Host) {
			return true // also `null`, the origin of sandboxed pages
		}
	}
	// Sent by browsers with every request, also with those that have no Origin. same-site is foreign too: names below
	// localhost are each somebody else.
	for _, site := range r.Header.Values("Sec-Fetch-Site") {
		if site != "same-origin" && site != "none" {
			return true
		}
	}
	return false
}
