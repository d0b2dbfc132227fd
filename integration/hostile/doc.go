// Package hostile pulls images that no honest registry serves: layers that fill disks or memory or
// confuse the unpacker, endless manifests, and registries that never finish. Package attacks
// contains named attacks.
//
// berth refuses each case, or the case has no effect. The tests bound its duration (generously) and
// the peak memory of the daemon and of berth-unpack. They check the gRPC code, the text and the
// leftovers. At the end the daemon pulls an honest image.
package hostile
