/* Under the emulation this name is the emulation itself: see simt.h. */
#include "simt.h"
