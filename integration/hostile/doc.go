// Package hostile pulls what no honest registry serves: layers made to fill disks and memory or to
// confuse what unpacks them, manifests without end, and registries that never finish. Attacks that
// have a name are in package attacks.
//
// Each case is refused, or comes to nothing, within bounds: of time (a deadline so generous that only a pull that
// would not end misses it), of memory (the peaks of the daemon and of berth-unpack), with a code and a
// text that say what is wrong, and leaving nothing. After all of them the daemon pulls an honest image.
package hostile
